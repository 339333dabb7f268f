"""Do the rollout servers have the student's weights? Looked at in every step, before its update.

verl sends the weights after every update and believes that they arrived. If they did not, it trains on answers of another
model; the rollout correction hides that as long as its factors are not truncated. Two things tell: the version that the servers
count, which is the step of the last update that reached them, and their log-probs of their own answers beside the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iwopd.cluster.verl.errors import SyncError
from iwopd.cluster.verl.params import Settings

DIFFERENCE = "iwopd/correction/logprob_difference"
"""The hook's metric of the step: mean |lp_0 - lp_rollout|."""
_UNTRAINED = "The step was not trained on; continue from the last checkpoint with --resume, and if it happens again look at"


def check_sync(tags: Sequence[Mapping[str, Any]], numbers: Mapping[str, float], settings: Settings, step: int) -> None:
    """End the job if the answers of this step are not the student's. `tags`: verl's, one per rollout."""
    versions = {version for tag in tags if (version := tag.get("min_global_steps")) is not None}
    if old := sorted(version for version in versions if version != step - 1):
        raise SyncError(
            f"step {step}: the rollout servers answered with the weights of step {old[0]}, and the student is at step "
            f"{step - 1}: the weight sync did not reach all of them. {_UNTRAINED} the servers' words in Ray's logs"
        )
    limit, found = settings.mismatch_limit, numbers.get(DIFFERENCE)
    if limit is not None and found is not None and not found <= limit:
        raise SyncError(
            f"step {step}: the rollout servers' log-probs of their own answers differ from the trainer's by {found:.3g} on "
            f"average (limit {limit:g}): the weight sync brought them other weights than the student's, or none, or they "
            f"compute in a coarser precision than engine.vllm.dtype says. {_UNTRAINED} correction/* in the metrics; raise "
            "rollout.mismatch_limit only if you know why"
        )

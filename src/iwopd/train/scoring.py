"""From the rollouts of a step to evidence: old, teacher and reference log-probs, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.config import Config
from iwopd.train.assembly import Parts
from iwopd.train.learner import ForwardPass
from iwopd.train.metrics import training_progress
from iwopd.train.pipeline import Written
from iwopd.train.state import TrainingStoppedError
from iwopd.types import Rollout, ScoredRollout, TokenBatch


@dataclass(frozen=True, eq=False)
class ScoredStep:
    """The batch of a step, and what it is made into."""

    batch: TokenBatch
    evidence: Evidence
    """[B, T]: the one place where a step is padded."""
    forward: ForwardPass | None
    """The update's own forward pass, if it has run already."""
    floored: int
    """Teacher log-probs of -inf."""

    def flat(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """An objective's columns [B, T] as [N], for the update."""
        return {name: values[self.batch.mask] for name, values in columns.items()}


def score_step(config: Config, parts: Parts, written: Written, step: int) -> ScoredStep:
    """Score what the student wrote. The teacher may still be at work when this begins."""
    kept = _kept(config, written.rollouts)
    forward = parts.learner.forward(kept)
    old = parts.ranks.share(kept, parts.student_scorer.score) if forward is None else forward.logprobs
    reference = parts.ranks.share(kept, parts.reference_scorer.score) if parts.reference_scorer else [None] * len(kept)
    scored, count = [], 0
    for rollout, lp_0, lp_r, lp_t in zip(kept, old, reference, written.teacher_logprobs(kept), strict=True):
        everywhere = torch.ones(len(rollout), dtype=torch.bool)
        floored = algo.floor_logprobs(lp_t, everywhere)
        if lp_r is not None:
            lp_r = algo.floor_logprobs(lp_r, everywhere, name="reference_logprobs").logprobs
        scored.append(ScoredRollout(rollout, lp_0, floored.logprobs, lp_r))
        count += floored.floored
    batch = TokenBatch.collate(scored, correct_rollouts=config.rollout.engine != "local")
    return ScoredStep(batch, _evidence(config, batch, kept, step), forward, count)


def _kept(config: Config, rollouts: Sequence[Rollout]) -> list[Rollout]:
    truncated = config.rollout.truncated
    if truncated != "keep" and all(rollout.stop_reason == "length" for rollout in rollouts):
        raise TrainingStoppedError(
            f"every rollout of the step was cut off at max_tokens and rollout.truncated is {truncated!r}: "
            "nothing is left to train on. Raise rollout.max_tokens, or keep them",
            exit_code=1,
        )
    return [rollout for rollout in rollouts if truncated != "drop" or rollout.stop_reason == "eos"]


def _evidence(config: Config, batch: TokenBatch, rollouts: Sequence[Rollout], step: int) -> Evidence:
    mask = batch.mask
    if config.rollout.truncated == "mask":
        mask = mask & torch.tensor([rollout.stop_reason == "eos" for rollout in rollouts])[:, None]

    def padded(values: Tensor | None) -> Tensor | None:
        return None if values is None else batch.pad(values)

    return Evidence(
        teacher_logprobs=batch.pad(batch.teacher_logprobs),
        old_logprobs=batch.pad(batch.old_logprobs),
        mask=mask,
        reference_logprobs=padded(batch.reference_logprobs),
        progress=training_progress(step, config.steps),
        rollout_logprobs=padded(batch.rollout_logprobs),
    )

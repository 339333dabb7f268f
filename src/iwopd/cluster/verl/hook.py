"""What must be known before a batch is split: new columns of the whole batch, and its metrics. `trainer.py` calls it.

Advantages (or the weights of a divergence) get a column of their own for the rules that need the rest of the batch, the
progress or another denominator; the worker's loss then reads the column. The denominator is verl's: it divides by the sum of
`loss_mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iwopd.algo.correction import rollout_mismatch
from iwopd.algo.evidence import Evidence
from iwopd.algo.logprobs import floor_logprobs
from iwopd.algo.objectives import Divergence, TrainingSignal
from iwopd.algo.rewards import spread_over_tokens
from iwopd.cluster.verl.carrying import Carried, gap_is_known
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.losses import batch_evidence, padded, signal_column
from iwopd.cluster.verl.params import Settings
from iwopd.cluster.verl.reward import read_verdict
from iwopd.train.checking import Judged
from iwopd.train.metrics import mean, signal_metrics
from iwopd.train.reward import StepRewards

JUDGED = ("uid", "extra_fields")
"""verl's columns of which prompt a rollout answers, and of what the checker said."""
LEFT_OUT = ("time/reward",)
"""Answers are judged while others are written: nobody waits for it alone."""


class Verdicts(NamedTuple):
    """What the checker said of the rollouts of a batch."""

    judged: Sequence[Judged]
    groups: Tensor
    """[B] integers: which rollouts answer the same prompt."""

    @classmethod
    def of(cls, data: Any) -> Verdicts:
        """What verl's reward workers said, taken out of the batch (`JUDGED`)."""
        judged = [read_verdict(extra) for extra in data.pop("extra_fields").tolist()]
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(uid, len(numbers)) for uid in data.pop("uid").tolist()]
        return cls(judged, torch.tensor(groups))

    @property
    def failures(self) -> list[str]:
        """Why there is no verdict, where there is none."""
        return [one.failure for one in self.judged if one.failure]


def before_the_split(
    data: Any, settings: Settings, progress: float, verdicts: Verdicts | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """New columns of a whole batch, ragged like its `response_mask`, and metrics by name.

    `verdicts`: where the settings have a reward.
    """
    from verl.workers.utils.padding import response_to_nested

    objective = settings.objective
    evidence, rewards = batch_evidence(data, objective, progress), None
    if settings.reward is not None:
        if verdicts is None:
            raise VerlError(f"reward.checker is {settings.reward.checker!r}, but the batch came without verdicts")
        rewards = StepRewards.of(settings.reward, evidence, *verdicts)
        groups = spread_over_tokens(verdicts.groups.to(evidence.old_logprobs.dtype), evidence.mask)
        evidence = replace(rewards.evidence, prompt=groups)
    signal = objective.signal(evidence)
    columns = {}
    if objective.needs_whole_batch or rewards is not None:
        mask = data["response_mask"]
        columns[signal_column(objective)] = response_to_nested(_factors(objective, evidence, signal), mask)
        if objective.rule.supervised is not None:
            columns["loss_mask"] = response_to_nested(signal.supervised.to(mask.dtype), mask)
    numbers = _metrics(objective, evidence, signal, progress) | _noise(data, evidence)
    if rewards is not None:
        measured = rewards.metrics(signal if gap_is_known(objective) else None)
        numbers |= {f"iwopd/{name}": float(value) for name, value in measured.items() if name not in LEFT_OUT}
    return columns, numbers


def _factors(objective: Carried, evidence: Evidence, signal: TrainingSignal) -> Tensor:
    """What the loss is made from, [B, T]: a divergence's weights, or the advantages with what the reward adds."""
    if isinstance(objective, Divergence):
        return signal.weights
    return objective.columns(evidence, signal)["advantages"].to(signal.advantages.dtype)


def _metrics(objective: Carried, evidence: Evidence, signal: TrainingSignal, progress: float) -> dict[str, float]:
    """The local engine's numbers about scores and signal; lists become one entry per bin, because verl logs numbers only."""
    numbers: dict[str, float] = {
        "progress": progress,
        "tokens": float(signal.supervised.sum()),
        "tokens_written": float(evidence.mask.sum()),
        "rollout/entropy_sampled": -mean(evidence.old_logprobs[evidence.mask]),
    }
    measured = signal_metrics(signal)
    if gap_is_known(objective):
        numbers["advantages/mean"] = mean(signal.advantages[signal.supervised])
        numbers["teacher/floored"] = float(floor_logprobs(evidence.teacher_logprobs, evidence.mask).floored)
    else:
        measured = {name: value for name, value in measured.items() if "weights" in name}
    for name, value in measured.items():
        numbers |= {f"{name}/{place}": item for place, item in enumerate(value)} if isinstance(value, list) else {name: value}
    return {f"iwopd/{name}": value for name, value in numbers.items()}


def _noise(data: Any, evidence: Evidence) -> dict[str, float]:
    """The student's log-probs by the engine that wrote against the trainer's: the noise floor as far as verl shows it.

    The teacher is behind such an engine, too, so it stands for both sides; the teacher's own is not measured.
    """
    if "rollout_log_probs" not in data:
        return {}
    rollout = floor_logprobs(padded(data["rollout_log_probs"]).float(), evidence.mask, name="rollout_logprobs").logprobs
    floor = rollout_mismatch(evidence.old_logprobs, rollout, evidence.mask).mean_difference
    names = ("correction/logprob_difference", "gap/noise_floor", "gap/noise_student")
    return {f"iwopd/{name}": floor for name in names}

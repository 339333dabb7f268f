"""From the rollouts of a step to evidence: old, teacher and reference log-probs, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import Objective, TrainingSignal
from iwopd.config import Config
from iwopd.train.assembly import Parts
from iwopd.train.learner import ForwardPass
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
    batch = TokenBatch.collate(scored, correct_rollouts=not parts.engine.exact)
    mask = batch.mask
    if config.rollout.truncated == "mask":
        mask = mask & torch.tensor([rollout.stop_reason == "eos" for rollout in kept])[:, None]
    evidence = evidence_of(batch, mask=mask, progress=training_progress(step, config.steps))
    return ScoredStep(batch, evidence, forward, count)


def evidence_of(batch: TokenBatch, *, mask: Tensor | None = None, progress: float | None = None) -> Evidence:
    """A batch as formulas see it, [B, T]; `mask` leaves out tokens that do not teach."""

    def padded(values: Tensor | None) -> Tensor | None:
        return None if values is None else batch.pad(values)

    return Evidence(
        teacher_logprobs=batch.pad(batch.teacher_logprobs),
        old_logprobs=batch.pad(batch.old_logprobs),
        mask=batch.mask if mask is None else mask,
        reference_logprobs=padded(batch.reference_logprobs),
        progress=progress,
        rollout_logprobs=padded(batch.rollout_logprobs),
    )


def loss_columns(
    objective: Objective, batch: TokenBatch, evidence: Evidence, signal: TrainingSignal | None = None
) -> dict[str, Tensor]:
    """What the objective's loss needs of each of the batch's tokens, [N]."""
    columns = objective.columns(evidence, signal or objective.signal(evidence))
    return {name: values[batch.mask] for name, values in columns.items()}


def _kept(config: Config, rollouts: Sequence[Rollout]) -> list[Rollout]:
    truncated = config.rollout.truncated
    if truncated != "keep" and all(rollout.stop_reason == "length" for rollout in rollouts):
        raise TrainingStoppedError(
            f"every rollout of the step was cut off at max_tokens and rollout.truncated is {truncated!r}: "
            "nothing is left to train on. Raise rollout.max_tokens, or keep them",
            exit_code=1,
        )
    return [rollout for rollout in rollouts if truncated != "drop" or rollout.stop_reason == "eos"]


def training_progress(step: int, steps: int) -> float:
    """Share of training done, in [0, 1]: 0 at the first step, 1 at the last. The curriculum follows it."""
    return min(1.0, max(0, step - 1) / max(1, steps - 1))

"""Numbers of a step and records of kept rollouts. `docs/run-directory.md` says what each name means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.signal import TrainingSignal, training_signal
from iwopd.config import Config
from iwopd.eval.runner import Evaluation
from iwopd.train.learner import Update
from iwopd.types import Rollout, TokenBatch

if TYPE_CHECKING:
    from iwopd.train.assembly import Parts

POSITION_BINS = 10


def training_progress(step: int, steps: int) -> float:
    """Share of training done, in [0, 1]: 0 at the first step, 1 at the last. The curriculum follows it."""
    return min(1.0, max(0, step - 1) / max(1, steps - 1))


def step_metrics(
    batch: TokenBatch, signal: TrainingSignal, rollouts: Sequence[Rollout], update: Update, floored: int
) -> dict[str, Any]:
    """What happened in a step, by name."""
    mask = signal.mask
    gap, weights = signal.gap[mask], signal.weights[mask]
    lengths = [len(rollout) for rollout in rollouts]
    profile = algo.position.position_profile(signal.gap, mask, bins=POSITION_BINS, weights=signal.weights)
    metrics: dict[str, Any] = {
        "kl/sampled": -_mean(gap),
        "gap/abs_mean": _mean(gap.abs()),
        "weights/mean": _mean(weights),
        "weights/min": float(weights.min()) if len(weights) else 0.0,
        "weights/max": float(weights.max()) if len(weights) else 0.0,
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": max(lengths),
        "rollout/truncated": sum(rollout.stop_reason == "length" for rollout in rollouts) / len(rollouts),
        "rollout/entropy_sampled": -_mean(batch.old_logprobs[mask]),
        "teacher/floored": floored,
        "update/padding_waste": update.padding_waste,
        "update/count": update.updates,
        "update/skipped": update.skipped,
        **{f"policy/{name}": value for name, value in update.stats.as_dict().items()},
        "position/abs_gap": profile.abs_gap.mean.tolist(),
    }
    if profile.weights is not None:
        metrics["position/weights"] = profile.weights.mean.tolist()
    return metrics


def kept_rollouts(config: Config, parts: Parts, evaluation: Evaluation, step: int) -> Iterator[dict[str, Any]]:
    """The first few rollouts of an evaluation with every token's numbers, for the report's token view."""
    count = config.eval.kept_rollouts
    rollouts = [rollout for rollout in evaluation.rollouts if rollout.sample == 0][:count]
    if not rollouts:
        return
    old, teacher = parts.student_scorer.score(rollouts), parts.teacher_scorer.score(rollouts)
    reference = parts.reference_scorer.score(rollouts) if parts.reference_scorer else None

    def pad(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask = pad([torch.ones(len(rollout), dtype=torch.bool) for rollout in rollouts])
    signal = training_signal(
        algo.floor_logprobs(pad(teacher), mask).logprobs,
        pad(old),
        mask,
        progress=training_progress(step, config.steps),
        reference_logprobs=None if reference is None else pad(reference),
        **config.method.signal,
    )
    places = [row for row, rollout in enumerate(evaluation.rollouts) if rollout.sample == 0]
    right = evaluation.result.scores.reshape(-1)
    for row, rollout in enumerate(rollouts):
        length = len(rollout)
        yield {
            "step": step,
            "prompt_id": rollout.prompt.id,
            "prompt": rollout.prompt.text,
            "answer": rollout.prompt.answer,
            "text": evaluation.texts[places[row]],
            "correct": bool(right[places[row]] > 0.5),
            "stop_reason": rollout.stop_reason,
            "token_ids": rollout.response_ids.tolist(),
            "tokens": [str(parts.tokenizer.decode([token])) for token in rollout.response_ids.tolist()],
            "student_logprobs": _rounded(old[row]),
            "teacher_logprobs": _rounded(teacher[row]),
            "gap": _rounded(signal.gap[row, :length]),
            "weights": _rounded(signal.weights[row, :length]),
        }


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]

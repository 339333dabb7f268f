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
from iwopd.lm import Sequences
from iwopd.teacher.local import LocalScorer
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
    lengths = [len(rollout) for rollout in rollouts]
    return {
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": max(lengths),
        "rollout/truncated": sum(rollout.stop_reason == "length" for rollout in rollouts) / len(rollouts),
        "rollout/entropy_sampled": -_mean(batch.old_logprobs[signal.mask]),
        "teacher/floored": floored,
        "update/padding_waste": update.padding_waste,
        "update/count": update.updates,
        "update/skipped": update.skipped,
        **{f"policy/{name}": value for name, value in update.stats.as_dict().items()},
        **signal_metrics(signal),
    }


def signal_metrics(signal: TrainingSignal) -> dict[str, Any]:
    """Gap and weights of a batch: means and extremes, and how they go along the response."""
    mask = signal.mask
    gap, weights = signal.gap[mask], signal.weights[mask]
    profile = algo.position.position_profile(signal.gap, mask, bins=POSITION_BINS, kl=-signal.gap, weights=signal.weights)
    metrics: dict[str, Any] = {
        "kl/sampled": -_mean(gap),
        "gap/abs_mean": _mean(gap.abs()),
        "weights/mean": _mean(weights),
        "weights/min": float(weights.min()) if len(weights) else 0.0,
        "weights/max": float(weights.max()) if len(weights) else 0.0,
        "position/abs_gap": profile.abs_gap.mean.tolist(),
    }
    if profile.kl is not None:
        metrics["position/kl"] = profile.kl.mean.tolist()
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
    divergence = _full_kl(parts, rollouts)
    places = [row for row, rollout in enumerate(evaluation.rollouts) if rollout.sample == 0]
    right = evaluation.result.scores.reshape(-1)
    for row, rollout in enumerate(rollouts):
        length = len(rollout)
        yield {
            "step": step,
            "task": evaluation.result.task,
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
            **({} if divergence is None else {"kl": _rounded(divergence[row])}),
        }


@torch.no_grad()
def _full_kl(parts: Parts, rollouts: Sequence[Rollout]) -> list[Tensor] | None:
    """KL(student || teacher) [T] over the whole vocabulary at every token; None if a model's head is not the plain one, or not
    in this process.
    """
    scorer = parts.teacher_scorer
    if not isinstance(scorer, LocalScorer):
        return None
    student, teacher = parts.student_scorer.lm, scorer.lm
    if not (student.fused and teacher.fused):
        return None
    (weight, bias), (teacher_weight, teacher_bias) = student.head, teacher.head
    was_training = student.model.training, teacher.model.training
    student.model.eval()
    teacher.model.eval()
    values = []
    try:
        for rollout in rollouts:  # one at a time: a few are kept, and none needs padding
            sequences = Sequences.build([torch.tensor(rollout.prompt.token_ids)], [rollout.response_ids])
            with parts.student_scorer.autocast():
                hidden = student.hidden(sequences.to(student.device))
            with scorer.autocast():
                teacher_hidden = teacher.hidden(sequences.to(teacher.device))
            kl = algo.token_kl(
                hidden,
                weight,
                teacher_hidden.to(hidden.device),
                teacher_weight.to(hidden.device),
                bias=bias,
                teacher_bias=None if teacher_bias is None else teacher_bias.to(hidden.device),
                temperature=student.temperature,
                vocab_size=student.vocab_size,
            )
            values.append(kl[0].cpu())
    finally:
        student.model.train(was_training[0])
        teacher.model.train(was_training[1])
    return values


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]

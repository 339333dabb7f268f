"""What is kept token by token: a few rollouts of each evaluation for the report, and batches whose update was skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.config import Config
from iwopd.eval.runner import Evaluation
from iwopd.lm import Sequences
from iwopd.modes import eval_mode
from iwopd.train.assembly import Parts
from iwopd.train.scoring import training_progress
from iwopd.types import Rollout, TokenBatch


def kept_rollouts(config: Config, parts: Parts, evaluation: Evaluation, step: int) -> Iterator[dict[str, Any]]:
    """The first few rollouts of an evaluation with every token's numbers, for the report's token view."""
    places = [row for row, rollout in enumerate(evaluation.rollouts) if rollout.sample == 0][: config.eval.kept_rollouts]
    rollouts = [evaluation.rollouts[place] for place in places]
    if not rollouts:
        return
    old, teacher = parts.student_scorer.score(rollouts), parts.teacher_scorer.score(rollouts)
    reference = parts.reference_scorer.score(rollouts) if parts.reference_scorer else None
    mask = _pad([torch.ones(len(rollout), dtype=torch.bool) for rollout in rollouts])
    evidence = Evidence(
        algo.floor_logprobs(_pad(teacher), mask).logprobs,
        _pad(old),
        mask,
        reference_logprobs=None if reference is None else _pad(reference),
        progress=training_progress(step, config.steps),
    )
    signal = parts.objective.signal(evidence)
    divergence = _full_kl(parts, rollouts)
    right = evaluation.result.scores.reshape(-1)
    for row, (place, rollout) in enumerate(zip(places, rollouts, strict=True)):
        length = len(rollout)
        yield {
            "step": step,
            "task": evaluation.result.task,
            "prompt_id": rollout.prompt.id,
            "prompt": rollout.prompt.text,
            "answer": rollout.prompt.answer,
            "text": evaluation.texts[place],
            "correct": bool(right[place] > 0.5),
            "stop_reason": rollout.stop_reason,
            "token_ids": rollout.response_ids.tolist(),
            "tokens": [str(parts.tokenizer.decode([token])) for token in rollout.response_ids.tolist()],
            "student_logprobs": _rounded(old[row]),
            "teacher_logprobs": _rounded(teacher[row]),
            "gap": _rounded(signal.gap[row, :length]),
            "weights": _rounded(signal.weights[row, :length]),
            **({} if divergence is None else {"kl": _rounded(divergence[row])}),
        }


def dump_skipped(folder: Path, batch: TokenBatch, columns: dict[str, Tensor], step: int) -> None:
    """Keep the batch of a skipped update: ids and lengths, and what the loss received of each token."""
    names = ("prompt_ids", "prompt_lengths", "response_ids", "lengths", "old_logprobs", "teacher_logprobs")
    tensors = {**{name: getattr(batch, name) for name in names}, **columns}
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / f"skipped-step-{step:06d}.safetensors")


@torch.no_grad()
def _full_kl(parts: Parts, rollouts: Sequence[Rollout]) -> list[Tensor] | None:
    """KL(student || teacher) [T] over the whole vocabulary at every token; None if a model does not give its distribution."""
    scorers = parts.student_scorer.whole_distribution, parts.teacher_scorer.whole_distribution
    if scorers[0] is None or scorers[1] is None:
        return None
    student, teacher = scorers[0].lm, scorers[1].lm
    (weight, bias), (teacher_weight, teacher_bias) = student.head, teacher.head
    values = []
    with eval_mode(student.model, teacher.model):
        for rollout in rollouts:  # one at a time: only a few are kept
            sequences = Sequences.from_rollouts([rollout])
            hidden = student.token_hidden(sequences.to(student.device))
            teacher_hidden = teacher.token_hidden(sequences.to(teacher.device))
            kl = algo.token_kl(
                hidden,
                weight,
                teacher_hidden.to(hidden.device),
                teacher_weight.to(hidden.device),
                bias=bias,
                teacher_bias=None if teacher_bias is None else teacher_bias.to(hidden.device),
                temperature=student.temperature,
                vocab_size=student.vocab_size,
                precision=student.head_precision,
            )
            values.append(kl.cpu())
    return values


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]

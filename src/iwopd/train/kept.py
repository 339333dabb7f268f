"""What is kept token by token: a few rollouts of each evaluation for the report, and batches whose update was skipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from iwopd.algo.spans import UNSCORED
from iwopd.algo.views import TokenScores
from iwopd.config import Config
from iwopd.eval.runner import Evaluation
from iwopd.filesystem import follow_umask
from iwopd.runs.logs import RunError
from iwopd.train.micro_batch import STATES
from iwopd.train.parts import Parts
from iwopd.train.scoring import chosen_ids, evidence_of, pair_kl, scored_rollouts, training_progress
from iwopd.train.thinking import thinking_mask
from iwopd.types import TokenBatch


def kept_rollouts(config: Config, parts: Parts, evaluation: Evaluation, step: int) -> Iterator[dict[str, Any]]:
    """The first few rollouts of an evaluation with every token's numbers, for the report's token view."""
    places = [row for row, rollout in enumerate(evaluation.rollouts) if rollout.sample == 0][: config.eval.kept_rollouts]
    rollouts = [evaluation.rollouts[place] for place in places]
    if not rollouts:
        return
    right = evaluation.result.scores.reshape(-1)
    # Only a few are kept: where both models are here, their whole distributions are compared, whatever the objective asks for.
    both = all(scorer.whole_distribution for scorer in (parts.student_scorer, parts.teacher_scorer))
    student_wanted, teacher_wanted = (
        replace(wanted, states=wanted.states or both) for wanted in (parts.objective.asks.student, parts.objective.asks.teacher)
    )
    student = parts.student_scorer.look(rollouts, student_wanted)
    teacher = parts.teacher_scorer.look(rollouts, teacher_wanted, chosen_ids(parts, student))
    reference = parts.reference_scorer.score(rollouts) if parts.reference_scorer else None
    scored = [
        replace(one, more={**one.more, "correct": torch.full_like(one.old_logprobs, float(right[place]))}, teacher_states=None)
        for one, place in zip(scored_rollouts(parts, rollouts, student, teacher, reference), places, strict=True)
    ]
    thinking = None if parts.thinking is None else [parts.thinking.mask(rollout) for rollout in rollouts]
    teaching = thinking_mask(config, thinking)
    where = {"progress": training_progress(step, config.steps), "agreement": parts.agreement}
    evidence = evidence_of(TokenBatch.collate(scored), mask=teaching, **where)
    signal = parts.objective.signal(evidence)
    matrices = [parts.student_scorer.output_matrix(), parts.teacher_scorer.output_matrix()] if both else []
    divergence = [pair_kl(a, matrices[0], b, matrices[1]) for a, b in zip(student, teacher, strict=True)] if both else None
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
            "student_logprobs": _rounded(student[row].logprobs),
            "teacher_logprobs": _rounded(teacher[row].logprobs),
            "gap": _rounded(signal.gap[row, :length]),
            "weights": _rounded(signal.weights[row, :length]),
            **_by_span(teacher[row], signal.gap[row, :length]),
            **({} if divergence is None else {"kl": _rounded(divergence[row])}),
        }


def _by_span(teacher: TokenScores, gap: Tensor) -> dict[str, list[Any]]:
    """Of a teacher with another tokenizer: each token's span, and numbers only where there are some.

    A span's log-prob stands on its last token, its gap on all of them; a token without a span has neither.
    """
    if teacher.spans is None:
        return {}
    spans = teacher.spans.tolist()
    last = {span: place for place, span in enumerate(spans)}
    logprobs = zip(spans, _rounded(teacher.logprobs), strict=True)
    return {
        "spans": spans,
        "teacher_logprobs": [
            value if span != UNSCORED and last[span] == place else None for place, (span, value) in enumerate(logprobs)
        ],
        "gap": [None if span == UNSCORED else value for span, value in zip(spans, _rounded(gap), strict=True)],
    }


def dump_skipped(folder: Path, batch: TokenBatch, columns: dict[str, Tensor], step: int) -> None:
    """Keep the batch of a skipped update: ids and lengths, and what the loss received of each token."""
    names = ["prompt_ids", "prompt_lengths", "response_ids", "lengths", "old_logprobs", "teacher_logprobs"]
    names += ["spans"] if batch.spans is not None else []
    tensors = {**{name: getattr(batch, name) for name in names}, **columns}
    tensors.pop(STATES, None)  # large, and the teacher can make them again
    path = folder / f"skipped-step-{step:06d}.safetensors"
    try:
        save_file({name: values.contiguous() for name, values in tensors.items()}, path)
        follow_umask(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {path}: {error}. Checkpoints are as they were: make room, then --resume") from None


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]

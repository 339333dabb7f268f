"""The noise floor of a run: the same model's log-probs over different paths of this very pipeline.

Each side, student and teacher, is scored as the run scores it, and then over every other path there is to the same model: one
rollout at a time instead of beside others, in float32 (where the model is in this process), by another replica (a server), and
the student by the engine that wrote the rollouts. The path that differs most counts. `algo.noise` has the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.noise import LARGEST_SHARE
from iwopd.config import Config
from iwopd.teacher.scorer import ScoringPath
from iwopd.train.doctor.asked import Asked
from iwopd.train.doctor.findings import Finding, passed, warning
from iwopd.train.parts import Parts
from iwopd.types import Rollout


class Side(NamedTuple):
    """How far apart two paths to one model are."""

    difference: float
    """Mean |difference| of a token's log-prob."""
    path: str
    """What differs, for the reader."""
    remedy: str


ALONE = ("one rollout at a time", "score in a higher precision (dtype, head_precision), or set models.attention")
ENGINE = ("the engine that writes", "give the engine the trainer's precision (section engine), or set rollout.engine = 'local'")
REPLICA = ("another server", "start all servers with the same version, dtype and parallelism")
STUDENT_FLOAT32 = ("float32", "compute in a higher precision: precision = 'no', models.dtype and head_precision float32")
TEACHER_FLOAT32 = ("float32", "load the teacher in a higher precision: models.teacher_dtype and head_precision float32")


def check_noise(config: Config, parts: Parts, rollouts: Sequence[Rollout], asked: Asked | None = None) -> Iterator[Finding]:
    """Is what teacher and student disagree about more than what two paths to one model disagree about?"""
    student, teacher, floor = measure_noise(config, parts, rollouts, asked)
    tokens = parts.max_response
    words = (
        f"two paths to the same model differ by {floor.total:.2g} a token (student {_side(student)}, teacher "
        f"{_side(teacher)}), teacher and student by {floor.gap:.3g}"
    )
    numbers = noise_metrics(floor)
    if config.teacher.is_student and not floor.gap:
        yield passed("noise floor", f"{words}: the student is its own teacher and has not moved", numbers)
        return
    if not floor.is_fault:
        yield passed("noise floor", words, numbers)
        return
    yield warning(
        "noise floor",
        f"{words}: the floor is {floor.share:.0%} of the gap (at most {LARGEST_SHARE:.0%} would be sound). A rule that sums "
        f"|gap| over {tokens:,} tokens sums up {floor.summed(tokens):.3g} nats of noise",
        max(student, teacher).remedy,
        numbers=numbers,
    )


def noise_metrics(floor: algo.NoiseFloor) -> dict[str, float]:
    """By the names that they have in metrics.jsonl."""
    return {"gap/noise_floor": floor.total, "gap/noise_student": floor.student, "gap/noise_teacher": floor.teacher}


def measure_noise(
    config: Config, parts: Parts, rollouts: Sequence[Rollout], asked: Asked | None = None
) -> tuple[Side, Side, algo.NoiseFloor]:
    """Student's side, teacher's side, and the floor that they add up to. `asked`: what other checks know already."""
    known = asked or Asked(parts, config.rollout.temperature)

    def side(kind: str, float32: tuple[str, str]) -> list[Side]:
        found: list[Side] = []
        first: dict[str, Tensor] = {}
        for path in known.paths[kind]:
            read = known.read(path, rollouts)
            scores = _floored(known.scores(path.scorer, read))
            found.append(_compared(scores, _alone(path, read), ALONE))
            if path.model_name in first:
                found.append(_compared(scores, first[path.model_name], REPLICA))
            first.setdefault(path.model_name, scores)
            if (exact := known.exact(path, read)) is not None:
                found.append(_compared(scores, _floored(exact), float32))
        return found

    old = _floored(known.scores(parts.student_scorer, rollouts))
    written = _floored(rollout.rollout_logprobs for rollout in rollouts)
    student = max([*side("student", STUDENT_FLOAT32), _compared(old, written, ENGINE)])
    teacher = max(side("teacher", TEACHER_FLOAT32))
    if any(path.reader for path in known.paths["teacher"]):
        gap = _span_gap(parts, rollouts)
    else:
        gap = algo.mean_difference(_floored(known.scores(parts.teacher_scorer, rollouts)), old)
    return student, teacher, algo.NoiseFloor(student.difference, teacher.difference, gap)


def _span_gap(parts: Parts, rollouts: Sequence[Rollout]) -> float:
    """Mean |gap| of the spans that a teacher with another tokenizer scores."""
    some = [rollout for rollout in rollouts if rollout.prompt.text or "messages" in rollout.prompt.metadata]
    found: list[list[Tensor]] = [[], []]
    for old, scores in zip(parts.student_scorer.score(some), parts.teacher_scorer.look(some), strict=True):
        of_tokens = torch.arange(len(old)) if scores.spans is None else scores.spans
        spans = algo.spans.Spans.of(of_tokens[None], of_tokens[None] >= 0)
        for side, values in zip(found, (scores.logprobs, old), strict=True):
            side.append(spans.sum(values[None])[spans.mask])
    return algo.mean_difference(*map(_floored, found))


def _alone(path: ScoringPath, rollouts: Sequence[Rollout]) -> Tensor:
    """Without neighbours, and in the opposite order."""
    scores = [path.scorer.score([rollout])[0] for rollout in reversed(rollouts)]
    return _floored(reversed(scores))


def _compared(scores: Tensor, other: Tensor, about: tuple[str, str]) -> Side:
    return Side(algo.mean_difference(scores, other), *about)


def _floored(scores: Iterable[Tensor]) -> Tensor:
    """Log-probs [N] of all rollouts as the run floors them."""
    values = torch.cat(list(scores)).float()
    return algo.floor_logprobs(values, torch.ones_like(values, dtype=torch.bool)).logprobs


def _side(side: Side) -> str:
    return f"{side.difference:.1g} against {side.path}"

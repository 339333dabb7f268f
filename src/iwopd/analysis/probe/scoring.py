"""Every token of the rollouts under both models: log-probs, full-vocabulary KL, top-k overlap, and what methods ask for.

Both models' hidden states are at hand here, so the agreement of gradients is taken on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence

from iwopd import algo
from iwopd.algo.evidence import FURTHER, Evidence
from iwopd.algo.objectives import Objective
from iwopd.algo.top_k import top_k_overlap
from iwopd.algo.views import TokenScores, Wanted, joined_scores, scores_of_logits
from iwopd.analysis.probe.agreement import GroupedParts
from iwopd.lm import ResponseModel, Sequences
from iwopd.own_head import chunk_rows
from iwopd.types import Rollout, number_prompts

TOKEN_BUDGET = 2048
"""Tokens that go through the models at a time."""
Key = tuple[str, int]
"""Further evidence by its name and the number of likely ids that it is made of (0: none, or all)."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Per-token numbers [B, T] of all rollouts, on the CPU, right-padded."""

    mask: Tensor
    prompts: list[int]
    """[B] which prompt each rollout answers, numbered from 0 without gaps."""
    student_logprobs: Tensor
    teacher_logprobs: Tensor
    gap: Tensor
    """`a[t] = lp_T[t] - lp_0[t]`, a teacher's -inf floored."""
    kl: Tensor
    """KL(student || teacher) of the next-token distributions."""
    shared: Tensor
    same_first: Tensor
    more: Mapping[Key, Tensor] = field(default_factory=dict)
    """[B, T] what the methods under test ask for beside all this."""
    correct: Tensor | None = None
    """[B] the rollout's score in [0, 1], NaN where nobody can judge it; None: nobody can judge any."""
    agreements: tuple[float, ...] = ()
    """Agreement of gradients (`algo.agreement`) in each batch of prompts, NaN where it has none; empty: not measured."""

    @property
    def agreement(self) -> float:
        """Mean over batches; 0 where it is not known, as at the first step of training."""
        known = [value for value in self.agreements if not math.isnan(value)]
        return sum(known) / len(known) if known else 0.0

    def evidence(self, objective: Objective) -> Evidence:
        """What a method is applied to, at the beginning of training; a gate stands where the measured agreement puts it."""
        further: dict[str, Tensor] = {}
        for name in FURTHER:
            if name not in objective.needs:
                continue
            if name == "prompt":
                further[name] = self._spread(torch.tensor(self.prompts))
            elif name == "correct" and self.correct is not None:
                further[name] = self._spread(self.correct)
            elif (key := evidence_key(name, objective)) == ("kl", 0):
                further[name] = self.kl
            elif key in self.more:
                further[name] = self.more[key]
        given = (self.teacher_logprobs, self.student_logprobs, self.mask)
        return Evidence(*given, progress=0.0, agreement=self.agreement, **further)

    def _spread(self, values: Tensor) -> Tensor:
        return values.to(self.student_logprobs.dtype)[:, None].expand(self.mask.shape)

    def part(self, rows: Sequence[int]) -> Tokens:
        """Those of some rollouts."""
        chosen = torch.tensor(rows, dtype=torch.long)
        width = int(self.mask[chosen].sum(-1).max()) if len(rows) else 0
        names = ("mask", "student_logprobs", "teacher_logprobs", "gap", "kl", "shared", "same_first")
        values: dict[str, Any] = {name: getattr(self, name)[chosen, :width] for name in names}
        return Tokens(
            prompts=[self.prompts[row] for row in rows],
            more={key: value[chosen, :width] for key, value in self.more.items()},
            correct=None if self.correct is None else self.correct[chosen],
            agreements=self.agreements,
            **values,
        )

    def cut(self, lengths: Tensor) -> Tokens:
        """The same with only the first `lengths` [B] tokens of each rollout. One that is cut has no answer to judge."""
        kept = torch.arange(self.mask.shape[1]) < lengths[:, None]
        whole = lengths >= self.mask.sum(-1)
        correct = None if self.correct is None else torch.where(whole, self.correct, math.nan)
        return replace(self, mask=self.mask & kept, correct=correct)


def evidence_key(name: str, objective: Objective) -> Key:
    return name, {"top_overlap": objective.overlap_k, "kl": objective.kl_k}.get(name, 0)


def score_tokens(
    student: ResponseModel,
    teacher: ResponseModel,
    rollouts: Sequence[Rollout],
    *,
    top_k: int,
    methods: Sequence[Objective] = (),
    groups: Sequence[Sequence[int]] = (),
    budget: int = TOKEN_BUDGET,
    advance: Callable[[int], None] = lambda rollouts: None,
) -> Tokens:
    """Score the rollouts; needs at least one, none of them without tokens. `methods` say what else is to be known.

    `groups` of rollouts, by number: their gradients' agreement is measured, if both heads are matrices.
    """
    lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
    batches = student.micro_batches(lengths, budget)
    trial = Sequences.from_rollouts([rollouts[batches[-1][-1]]])  # the shortest
    for lm in (student, teacher):
        lm.check_head(trial, trained=lm is student)
    wanted = _wanted(methods, top_k)
    parts = GroupedParts(groups if student.fused and teacher.fused else ())
    found: list[dict[Key, Tensor]] = [{} for _ in rollouts]
    for rows in batches:
        chosen = [rollouts[row] for row in rows]
        lengths = [len(rollout) for rollout in chosen]
        seen = _score(student, teacher, Sequences.from_rollouts(chosen), *wanted, slopes=bool(groups))
        values = _numbers(seen.student, seen.teacher, top_k, methods) | {("kl", 0): seen.kl.cpu()}
        for name, value in values.items():
            for row, part in zip(rows, value.split(lengths), strict=True):
                found[row][name] = part
        if seen.hidden is not None and seen.slopes is not None:
            both = (scores.logprobs.split(lengths) for scores in (seen.student, seen.teacher))
            parts.add(rows, seen.hidden, seen.slopes, *both)
        advance(len(rows))
    columns = {name: pad_sequence([numbers[name] for numbers in found], batch_first=True) for name in found[0]}
    mask = pad_sequence([torch.ones(len(rollout), dtype=torch.bool) for rollout in rollouts], batch_first=True)
    own, other = columns.pop(("student_logprobs", 0)), columns.pop(("teacher_logprobs", 0))
    return Tokens(
        mask=mask,
        prompts=number_prompts(rollouts),
        student_logprobs=own,
        teacher_logprobs=algo.floor_logprobs(other, mask).logprobs,
        gap=algo.opd_advantages(other, own, mask),
        kl=columns.pop(("kl", 0)),
        shared=columns.pop(("shared", 0)),
        same_first=columns.pop(("same_first", 0)),
        more=columns,
        agreements=parts.agreements,
    )


def _wanted(methods: Sequence[Objective], top_k: int) -> tuple[Wanted, Wanted]:
    """What student and teacher are asked for: likely ids for the overlap, and all that a method needs. States are at hand."""
    sides = []
    for side in ("student", "teacher"):
        asked = [getattr(method.asks, side) for method in methods]
        most = max([top_k, *(one.top_k for one in asked)])
        sides.append(Wanted(any(one.entropy for one in asked), most, any(one.chosen for one in asked)))
    return sides[0], sides[1]


def _numbers(ours: TokenScores, theirs: TokenScores, top_k: int, methods: Sequence[Objective]) -> dict[Key, Tensor]:
    """[N] by name, of what both models said."""
    if ours.top_ids is None or theirs.top_ids is None:
        raise ValueError("the overlap needs the likeliest ids of both models")
    shared, same_first = top_k_overlap(ours.top_ids[:, :top_k], theirs.top_ids[:, :top_k])
    found = {"student_logprobs": ours.logprobs, "teacher_logprobs": theirs.logprobs, "shared": shared, "same_first": same_first}
    more = {
        evidence_key(name, method): value for method in methods for name, value in method.further_evidence(ours, theirs).items()
    }
    return {(name, 0): value for name, value in found.items()} | more


@dataclass(frozen=True, eq=False)
class _Seen:
    """What both say of the N response tokens, row after row, on the CPU; and their KL [N]."""

    student: TokenScores
    teacher: TokenScores
    kl: Tensor
    hidden: Tensor | None = None
    slopes: Tensor | None = None
    """The student's hidden states and the KL's gradient by them, [N, H], if they are wanted and the heads are matrices."""


@torch.no_grad()
def _score(
    student: ResponseModel,
    teacher: ResponseModel,
    sequences: Sequences,
    of_student: Wanted,
    of_teacher: Wanted,
    *,
    slopes: bool,
) -> _Seen:
    ours, theirs = sequences.to(student.device), sequences.to(teacher.device)
    if not (student.fused and teacher.fused):
        return _Seen(*_own_scores(student, teacher, ours, theirs, of_student, of_teacher))
    hidden, teacher_hidden = student.token_hidden(ours), teacher.token_hidden(theirs).to(student.device)
    (weight, bias), (teacher_weight, teacher_bias) = student.head, teacher.head
    own = student.head_scores(hidden, ours.response_ids, of_student)
    other = teacher.head_scores(teacher_hidden, ours.response_ids, of_teacher, own.top_ids)
    options: dict[str, Any] = {"bias": bias, "teacher_bias": teacher_bias, "vocab_size": student.vocab_size}
    options |= {"precision": student.head_precision, "temperature": student.temperature}
    if not slopes:
        return _Seen(own.cpu(), other.cpu(), algo.token_kl(hidden, weight, teacher_hidden, teacher_weight, **options))
    ones = torch.ones(len(hidden), device=hidden.device)
    with torch.enable_grad():  # the loss has the KL of every token, and makes the gradient in the same pass
        hidden.requires_grad_()
        fixed = (weight.detach(), teacher_hidden, teacher_weight, ones, ones.bool())
        options["bias"] = None if bias is None else bias.detach()
        loss = algo.fused_divergence_loss(hidden, *fixed, kind=algo.DivergenceKind("reverse-kl"), denominator=1, **options)
        (gradient,) = torch.autograd.grad(loss.loss, [hidden])
    return _Seen(own.cpu(), other.cpu(), loss.values, hidden.detach(), gradient)


def _own_scores(
    student: ResponseModel,
    teacher: ResponseModel,
    ours: Sequences,
    theirs: Sequences,
    of_student: Wanted,
    of_teacher: Wanted,
) -> tuple[TokenScores, TokenScores, Tensor]:
    """The same from the models' own logits, a few tokens at a time: for models whose head is more than a matrix."""
    student_logits, teacher_logits = student.own_logits(ours), teacher.own_logits(theirs)
    own_parts, other_parts, kl = [], [], []
    step = min(chunk_rows(lm.model) for lm in (student, teacher))
    for start in range(0, len(ours.response_ids), step):
        rows = slice(start, start + step)
        own, other = student_logits(rows), teacher_logits(rows).to(student.device)
        kl.append(kl_div(other.log_softmax(-1), own.log_softmax(-1), reduction="none", log_target=True).sum(-1))
        own_parts.append(scores_of_logits(own.clone(), ours.response_ids[rows], of_student))
        other_parts.append(scores_of_logits(other.clone(), ours.response_ids[rows], of_teacher, own_parts[-1].top_ids))
    return joined_scores(own_parts).cpu(), joined_scores(other_parts).cpu(), torch.cat(kl)


def with_verdicts(tokens: Tokens, scores: Sequence[float]) -> Tokens:
    """The same with the rollouts' scores; NaN where nobody can judge."""
    known = any(not math.isnan(score) for score in scores)
    return replace(tokens, correct=torch.tensor(scores) if known else None)

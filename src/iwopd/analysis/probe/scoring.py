"""Every token of the rollouts under both models: log-probs, full-vocabulary KL, top-k overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.top_k import TopKOverlap, token_top_k_overlap, top_k_overlap
from iwopd.lm import ResponseModel, Sequences
from iwopd.own_head import chunk_rows
from iwopd.types import Rollout, number_prompts

TOKEN_BUDGET = 2048
"""Tokens that go through the models at a time."""


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

    @cached_property
    def evidence(self) -> Evidence:
        """What rules are applied to, at the beginning of training."""
        return Evidence(self.teacher_logprobs, self.student_logprobs, self.mask, progress=0.0)


def score_tokens(
    student: ResponseModel,
    teacher: ResponseModel,
    rollouts: Sequence[Rollout],
    *,
    top_k: int,
    budget: int = TOKEN_BUDGET,
    advance: Callable[[int], None] = lambda rollouts: None,
) -> Tokens:
    """Score the rollouts; needs at least one, none of them without tokens."""
    lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
    batches = student.micro_batches(lengths, budget)
    trial = Sequences.from_rollouts([rollouts[batches[-1][-1]]])  # the shortest
    for lm in (student, teacher):
        lm.check_head(trial, trained=lm is student)
    found: list[list[Tensor]] = [[] for _ in rollouts]
    for rows in batches:
        chosen = [rollouts[row] for row in rows]
        values = _score(student, teacher, Sequences.from_rollouts(chosen), top_k)
        parts = zip(*(value.cpu().split([len(rollout) for rollout in chosen]) for value in values), strict=True)
        for row, numbers in zip(rows, parts, strict=True):
            found[row] = list(numbers)
        advance(len(rows))
    columns = [pad_sequence(list(column), batch_first=True) for column in zip(*found, strict=True)]
    student_logprobs, teacher_logprobs, kl, shared, same_first = columns
    mask = pad_sequence([torch.ones(len(rollout), dtype=torch.bool) for rollout in rollouts], batch_first=True)
    return Tokens(
        mask=mask,
        prompts=number_prompts(rollouts),
        student_logprobs=student_logprobs,
        teacher_logprobs=algo.floor_logprobs(teacher_logprobs, mask).logprobs,
        gap=algo.opd_advantages(teacher_logprobs, student_logprobs, mask),
        kl=kl,
        shared=shared,
        same_first=same_first,
    )


@torch.no_grad()
def _score(student: ResponseModel, teacher: ResponseModel, sequences: Sequences, top_k: int) -> list[Tensor]:
    """[N] of the response tokens, row after row: student's and teacher's log-probs, KL, overlap, same first."""
    ours, theirs = sequences.to(student.device), sequences.to(teacher.device)
    if not (student.fused and teacher.fused):
        return _own_scores(student, teacher, ours, theirs, top_k)
    hidden, teacher_hidden = student.token_hidden(ours), teacher.token_hidden(theirs).to(student.device)
    (weight, bias), (teacher_weight, teacher_bias) = student.head, teacher.head
    ids = ours.response_ids
    options: dict[str, Any] = {"bias": bias, "teacher_bias": teacher_bias, "vocab_size": student.vocab_size}
    options["precision"] = student.head_precision
    return [
        student.head_logprobs(hidden, ids),
        teacher.head_logprobs(teacher_hidden, ids),
        algo.token_kl(hidden, weight, teacher_hidden, teacher_weight, temperature=student.temperature, **options),
        *token_top_k_overlap(hidden, weight, teacher_hidden, teacher_weight, top_k, **options),
    ]


def _own_scores(student: ResponseModel, teacher: ResponseModel, ours: Sequences, theirs: Sequences, top_k: int) -> list[Tensor]:
    """The same from the models' own logits, a few tokens at a time: for models whose head is more than a matrix."""
    student_logits, teacher_logits = student.own_logits(ours), teacher.own_logits(theirs)
    found: list[list[Tensor]] = []
    step = min(chunk_rows(lm.model) for lm in (student, teacher))
    for start in range(0, len(ours.response_ids), step):
        rows = slice(start, start + step)
        own, other = student_logits(rows), teacher_logits(rows).to(student.device)
        overlap: TopKOverlap = top_k_overlap(own, other, top_k)
        own, other, ids = own.log_softmax(-1), other.log_softmax(-1), ours.response_ids[rows, None]
        kl = kl_div(other, own, reduction="none", log_target=True).sum(-1)
        found.append([own.gather(1, ids).squeeze(1), other.gather(1, ids).squeeze(1), kl, *overlap])
    return [torch.cat(column) for column in zip(*found, strict=True)]

"""What flows through the house: each room hands the next one a frozen object.

    Prompt --rollout--> Rollout --teacher--> ScoredRollout --batch--> TokenBatch --algo--> loss
           --train--> StepStats;   --every k steps--> EvalResult

Shape letters: B rollouts, T response tokens of the longest, N response tokens of all (in an evaluation: problems), K samples.
Every object checks its shapes, dtypes and finiteness when it is built. Objects with tensors are equal only to themselves.
Log-probs are natural, at the sampling temperature, over the full vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

StopReason = Literal["eos", "length", "horizon"]
STOP_REASONS: tuple[StopReason, ...] = ("eos", "length", "horizon")
Writer = Literal["student", "data", "teacher"]


@dataclass(frozen=True)
class Prompt:
    """One prompt, rendered to ids."""

    id: str
    """Unique within its data set; names the prompt in logs and seeds its sampling noise."""
    token_ids: tuple[int, ...]
    """What the student sees, chat template included. At least one id."""
    text: str = ""
    answer: str | None = None
    """The reference answer, for checkers."""
    teacher: str | None = None
    """Which teacher scores it, where there are several."""
    begun: str = ""
    """What of the answer the prompt holds already: a thinking block that its template opens, a prefill."""
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"Prompt.token_ids of {self.id!r} is empty")
        if any(not isinstance(i, int) or i < 0 for i in self.token_ids):
            raise ValueError(f"Prompt.token_ids of {self.id!r} must be integers >= 0")


@dataclass(frozen=True, eq=False)
class Rollout:
    """One answer: of the student, unless `writer` says otherwise."""

    prompt: Prompt
    response_ids: Tensor
    """[T] int64, end-of-sequence token included if there was one."""
    rollout_logprobs: Tensor
    """[T] float32 or float64: the generating engine's own log-probs; 0 where nobody drew the answer (it is given)."""
    stop_reason: StopReason
    """`eos`: the student ended its answer; `length`: it was cut off; `horizon`: what would follow is not needed."""
    sample: int = 0
    """Which of the prompt's samples this is."""
    writer: Writer = "student"

    def __post_init__(self) -> None:
        owner = f"Rollout({self.prompt.id!r})"
        _check_ids(f"{owner}.response_ids", self.response_ids)
        _check_logprobs(f"{owner}.rollout_logprobs", self.rollout_logprobs, self.response_ids.shape)
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(f"{owner}.stop_reason must be one of {STOP_REASONS}, got {self.stop_reason!r}")
        if self.stop_reason == "eos" and len(self.response_ids) == 0:
            raise ValueError(f"{owner}.stop_reason is 'eos' but there is no token: the end-of-sequence token belongs to it")

    def __len__(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True, eq=False)
class Piece:
    """The next tokens of an answer that is being written."""

    row: int
    """Which answer: its place in the list that `Sampler.sample` returns."""
    prompt: Prompt
    ids: Tensor
    """[k] int64, on the CPU: what was written since the last piece of this answer."""
    logprobs: Tensor
    """[k] the generating engine's own."""
    ended: bool = False
    """It is the last one: the answer has ended or reached its limit."""


def number_prompts(rollouts: Sequence[Rollout]) -> list[int]:
    """[B] the number of each rollout's prompt, in the order in which they occur."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(rollout.prompt.id, len(numbers)) for rollout in rollouts]


@dataclass(frozen=True, eq=False)
class ScoredRollout:
    """A rollout with the log-probs that the loss needs."""

    rollout: Rollout
    old_logprobs: Tensor
    """[T] `lp_0`: the trainer's own log-probs of the frozen rollout policy."""
    teacher_logprobs: Tensor
    """[T] `lp_T`, with -inf already floored (`algo.floor_logprobs`)."""
    reference_logprobs: Tensor | None = None
    """[T] `lp_R`, for ExOPD and the auxiliary KL."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Further evidence [T, ...] by its name in `algo.evidence.Evidence`."""
    teacher_states: Tensor | None = None
    """[T, H] the teacher's hidden states, where the loss compares whole distributions."""
    spans: Tensor | None = None
    """[T] int64, of a teacher with another tokenizer: see `algo.views.TokenScores`."""

    def __post_init__(self) -> None:
        owner = f"ScoredRollout({self.rollout.prompt.id!r})"
        for name in ("old_logprobs", "teacher_logprobs", "reference_logprobs"):
            _check_logprobs(f"{owner}.{name}", getattr(self, name), self.rollout.response_ids.shape)
        for name, values in self.more.items():
            _check_rows(f"{owner}.{name}", values, len(self.rollout))
        _check_spans(f"{owner}.spans", self.spans, len(self.rollout))

    def __len__(self) -> int:
        return len(self.rollout)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Scored rollouts, one after the other: the N response tokens of all of them in one row, without padding."""

    prompt_ids: Tensor
    """[M] int64: the prompts of all rollouts."""
    prompt_lengths: Tensor
    """[B] int64."""
    response_ids: Tensor
    """[N] int64."""
    lengths: Tensor
    """[B] int64: response tokens of each rollout."""
    old_logprobs: Tensor
    """[N] `lp_0`."""
    teacher_logprobs: Tensor
    """[N] `lp_T`."""
    rollout_logprobs: Tensor | None = None
    """[N] `lp_rollout`, where another engine generated."""
    reference_logprobs: Tensor | None = None
    """[N] `lp_R`."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Further evidence [N, ...] by its name in `algo.evidence.Evidence`."""
    teacher_states: Tensor | None = None
    """[N, H]."""
    spans: Tensor | None = None
    """[N] int64 span of each token within its rollout, -1: none. There if a teacher has another tokenizer."""

    def __post_init__(self) -> None:
        for ids, lengths in (("prompt_ids", "prompt_lengths"), ("response_ids", "lengths")):
            _check_ids(f"TokenBatch.{ids}", getattr(self, ids))
            _check_ids(f"TokenBatch.{lengths}", getattr(self, lengths))
            total = int(getattr(self, lengths).sum())
            if total != len(getattr(self, ids)):
                raise ValueError(f"TokenBatch.{lengths} add up to {total}, but there are {len(getattr(self, ids))} {ids}")
        if len(self.prompt_lengths) != len(self.lengths):
            raise ValueError(f"TokenBatch has {len(self.prompt_lengths)} prompts and {len(self.lengths)} responses")
        for name in ("old_logprobs", "teacher_logprobs", "rollout_logprobs", "reference_logprobs"):
            _check_logprobs(f"TokenBatch.{name}", getattr(self, name), self.response_ids.shape)
        for name, values in self.more.items():
            _check_rows(f"TokenBatch.{name}", values, len(self.response_ids))
        _check_spans("TokenBatch.spans", self.spans, len(self.response_ids))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def mask(self) -> Tensor:
        """[B, T] bool: the valid tokens of responses padded on the right."""
        return torch.arange(int(self.lengths.max()))[None] < self.lengths[:, None]

    def pad(self, values: Tensor) -> Tensor:
        """[N, ...] of the response tokens as [B, T, ...], 0 outside the mask: for formulas that run along a rollout."""
        padded = values.new_zeros((*self.mask.shape, *values.shape[1:]))
        padded[self.mask] = values
        return padded

    def places(self, rows: Sequence[int]) -> Tensor:
        """[n] where the response tokens of these rollouts stand among the N, rollout after rollout."""
        first = (self.lengths.cumsum(0) - self.lengths).tolist()
        return torch.cat([torch.arange(first[row], first[row] + int(self.lengths[row])) for row in rows])

    @classmethod
    def collate(cls, rollouts: Sequence[ScoredRollout], *, correct_rollouts: bool = False) -> TokenBatch:
        """One batch of scored rollouts; `correct_rollouts` takes the engine's own log-probs along for the correction."""
        if not rollouts:
            raise ValueError("cannot make a TokenBatch of no rollouts")
        if correct_rollouts and (other := next((item.rollout for item in rollouts if item.rollout.writer != "student"), None)):
            raise ValueError(f"the answer to {other.prompt.id!r} is of the {other.writer}: the correction is for the student's")
        reference = [item.reference_logprobs for item in rollouts if item.reference_logprobs is not None]
        if reference and len(reference) < len(rollouts):
            missing = next(row for row, item in enumerate(rollouts) if item.reference_logprobs is None)
            raise ValueError(f"reference_logprobs are missing from row {missing}, but other rows have them")
        prompts = [item.rollout.prompt.token_ids for item in rollouts]
        states = [item.teacher_states for item in rollouts if item.teacher_states is not None]
        return cls(
            prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.long),
            prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
            response_ids=torch.cat([item.rollout.response_ids for item in rollouts]),
            lengths=torch.tensor([len(item) for item in rollouts]),
            old_logprobs=torch.cat([item.old_logprobs for item in rollouts]),
            teacher_logprobs=torch.cat([item.teacher_logprobs for item in rollouts]),
            rollout_logprobs=torch.cat([item.rollout.rollout_logprobs for item in rollouts]) if correct_rollouts else None,
            reference_logprobs=torch.cat(reference) if reference else None,
            more={name: torch.cat([item.more[name] for item in rollouts]) for name in rollouts[0].more},
            teacher_states=torch.cat(states) if states else None,
            spans=_joined_spans(rollouts),
        )


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did."""

    step: int
    """Counts from 1."""
    loss: float
    """NaN or infinite only if the update was skipped."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Supervised response tokens of the step: the loss's denominator."""
    rollouts: int
    skipped: bool = False
    """The update did not touch the weights, because its loss or gradient was not finite."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by stage."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step", "tokens", "rollouts"):
            if getattr(self, name) < 0:
                raise ValueError(f"StepStats.{name} of step {self.step} is {getattr(self, name)}; it must not be negative")
        for name in ("loss", "grad_norm"):
            if not (self.skipped or math.isfinite(getattr(self, name))):
                raise ValueError(f"StepStats.{name} of step {self.step} is {getattr(self, name)}, yet it was not skipped")


@dataclass(frozen=True, eq=False)
class EvalResult:
    """One model on one task."""

    task: str
    problem_ids: tuple[str, ...]
    scores: Tensor
    """[N, K] float64 in [0, 1]: the score of each sample of each problem (1: right)."""
    step: int | None = None
    """Training step of the model; None outside a run."""

    def __post_init__(self) -> None:
        if self.scores.dim() != 2 or len(self.scores) != len(self.problem_ids) or not self.scores.dtype.is_floating_point:
            raise ValueError(
                f"EvalResult.scores of {self.task!r} must be floats [{len(self.problem_ids)}, K], "
                f"got {self.scores.dtype} {list(self.scores.shape)}"
            )
        if len(set(self.problem_ids)) != len(self.problem_ids):
            raise ValueError(f"EvalResult.problem_ids of {self.task!r} are not unique")
        bad = ~((self.scores >= 0) & (self.scores <= 1))
        if bad.any():
            row, sample = (int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"EvalResult.scores of {self.task!r} is {float(self.scores[row, sample])} in row {row} "
                f"({self.problem_ids[row]!r}), sample {sample}; it must lie in [0, 1]"
            )

    @property
    def mean(self) -> float:
        """mean@K: the average over problems and samples."""
        return float(self.scores.mean())


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype != torch.long:
        raise TypeError(f"{name} must be int64, got {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got {list(ids.shape)}")
    _refuse(name, ids, ids < 0)


def _check_logprobs(name: str, values: Tensor | None, shape: torch.Size) -> None:
    if values is None:
        return
    if values.shape != shape:
        raise ValueError(f"{name} has shape {list(values.shape)}, expected {list(shape)}")
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64, got {values.dtype}")
    _refuse(name, values, ~torch.isfinite(values))


def _check_rows(name: str, values: Tensor, count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} rows for {count} tokens")


def _check_spans(name: str, spans: Tensor | None, count: int) -> None:
    if spans is None:
        return
    _check_rows(name, spans, count)
    if spans.dtype != torch.long or spans.dim() != 1:
        raise TypeError(f"{name} must be int64 [{count}], got {spans.dtype} {list(spans.shape)}")
    _refuse(name, spans, spans < -1)


def _joined_spans(rollouts: Sequence[ScoredRollout]) -> Tensor | None:
    """[N]; of a rollout whose teacher reads the student's ids, every token is a span of its own. None if all are such."""
    if all(item.spans is None for item in rollouts):
        return None
    return torch.cat([torch.arange(len(item)) if item.spans is None else item.spans for item in rollouts])


def _refuse(name: str, values: Tensor, bad: Tensor) -> None:
    if bad.any():
        place = int(bad.nonzero()[0])
        raise ValueError(f"{name} is {values[place].item()} at token {place}")

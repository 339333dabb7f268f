"""What flows through the house, one frozen object a room.

    Prompt --rollout--> Rollout --teacher--> ScoredRollout --batch--> TokenBatch --algo--> loss
           --train--> StepStats;   --every k steps--> EvalResult

Shape letters: B rollouts, P prompt tokens, T response tokens, N problems, K samples a problem. Every object checks its
shapes, dtypes and finiteness when it is built; the error names the field and the row. Objects with tensors are equal only to
themselves. Log-probs are natural, at the
sampling temperature, over the full vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

StopReason = Literal["eos", "length"]
STOP_REASONS: tuple[StopReason, ...] = ("eos", "length")


@dataclass(frozen=True)
class Prompt:
    """One prompt, rendered to ids."""

    id: str
    """Unique within its data set; names the prompt in logs and seeds its sampling noise."""
    token_ids: tuple[int, ...]
    """What the student sees, chat template included. At least one id."""
    text: str = ""
    """The same, readable."""
    answer: str | None = None
    """The reference answer, for checkers."""
    teacher: str | None = None
    """Which teacher scores it, where there are several."""
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"Prompt.token_ids of {self.id!r} is empty")
        if any(not isinstance(i, int) or i < 0 for i in self.token_ids):
            raise ValueError(f"Prompt.token_ids of {self.id!r} must be integers >= 0")


@dataclass(frozen=True, eq=False)
class Rollout:
    """One answer of the student."""

    prompt: Prompt
    response_ids: Tensor
    """[T] int64, end-of-sequence token included if there was one."""
    rollout_logprobs: Tensor
    """[T] float32 or float64: the generating engine's own log-probs."""
    stop_reason: StopReason
    """`eos`: the student ended its answer; `length`: it was cut off."""
    sample: int = 0
    """Which of the prompt's samples this is."""

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
class ScoredRollout:
    """A rollout with the log-probs that the loss needs."""

    rollout: Rollout
    old_logprobs: Tensor
    """[T] `lp_0`: the trainer's own log-probs of the frozen rollout policy."""
    teacher_logprobs: Tensor
    """[T] `lp_T`, with -inf already floored (`algo.floor_logprobs`)."""
    reference_logprobs: Tensor | None = None
    """[T] `lp_R`, for ExOPD and the auxiliary KL."""

    def __post_init__(self) -> None:
        owner = f"ScoredRollout({self.rollout.prompt.id!r})"
        for name in ("old_logprobs", "teacher_logprobs", "reference_logprobs"):
            values = getattr(self, name)
            if values is not None:
                _check_logprobs(f"{owner}.{name}", values, self.rollout.response_ids.shape)

    def __len__(self) -> int:
        return len(self.rollout)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Scored rollouts as padded tensors: prompts [B, P] padded on the left, responses [B, T] on the right."""

    prompt_ids: Tensor
    """[B, P] int64."""
    prompt_mask: Tensor
    """[B, P] bool, true on real prompt tokens: the last ones of each row."""
    response_ids: Tensor
    """[B, T] int64."""
    mask: Tensor
    """[B, T] bool, true on valid response tokens: the first ones of each row."""
    old_logprobs: Tensor
    """[B, T] `lp_0`."""
    teacher_logprobs: Tensor
    """[B, T] `lp_T`."""
    rollout_logprobs: Tensor | None = None
    """[B, T] `lp_rollout`, where another engine generated."""
    reference_logprobs: Tensor | None = None
    """[B, T] `lp_R`."""

    def __post_init__(self) -> None:
        for name in ("prompt_mask", "mask"):
            mask = getattr(self, name)
            if mask.dtype != torch.bool or mask.dim() != 2:
                raise ValueError(f"TokenBatch.{name} must be a boolean [B, T] tensor, got {mask.dtype} {list(mask.shape)}")
        _check_ids("TokenBatch.prompt_ids", self.prompt_ids, self.prompt_mask)
        _check_ids("TokenBatch.response_ids", self.response_ids, self.mask)
        if len(self.prompt_mask) != len(self.mask):
            raise ValueError(f"TokenBatch has {len(self.prompt_mask)} prompts and {len(self.mask)} responses")
        _check_padding("TokenBatch.mask", self.mask, side="right")
        _check_padding("TokenBatch.prompt_mask", self.prompt_mask, side="left")
        for name in ("old_logprobs", "teacher_logprobs", "rollout_logprobs", "reference_logprobs"):
            values = getattr(self, name)
            if values is not None:
                _check_logprobs(f"TokenBatch.{name}", values, self.mask.shape, self.mask)

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def lengths(self) -> Tensor:
        """[B] valid response tokens of each row."""
        return self.mask.sum(-1)

    def select(self, rows: Sequence[int] | Tensor) -> TokenBatch:
        """These rows, with padding that none of them needs cut off."""
        index = torch.as_tensor(rows, device=self.mask.device)
        if index.dtype == torch.bool:
            raise TypeError("TokenBatch.select takes row numbers, not a boolean mask; pass mask.nonzero().squeeze(1)")
        index = index.long()
        tokens = int(self.lengths[index].max()) if len(index) else 0
        prompt = int(self.prompt_mask[index].sum(-1).max()) if len(index) else 0
        first = self.prompt_ids.shape[1] - prompt

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index, :tokens]

        return replace(
            self,
            prompt_ids=self.prompt_ids[index, first:],
            prompt_mask=self.prompt_mask[index, first:],
            response_ids=self.response_ids[index, :tokens],
            mask=self.mask[index, :tokens],
            old_logprobs=self.old_logprobs[index, :tokens],
            teacher_logprobs=self.teacher_logprobs[index, :tokens],
            rollout_logprobs=cut(self.rollout_logprobs),
            reference_logprobs=cut(self.reference_logprobs),
        )

    @classmethod
    def collate(cls, rollouts: Sequence[ScoredRollout], *, pad_id: int = 0, correct_rollouts: bool = False) -> TokenBatch:
        """Pad scored rollouts into one batch.

        `correct_rollouts` carries the engine's own log-probs along for `algo.rollout_correction`. Reference log-probs
        go along if every rollout has them; if only some do, that is an error.
        """
        if not rollouts:
            raise ValueError("cannot make a TokenBatch of no rollouts")
        with_reference = [item.reference_logprobs is not None for item in rollouts]
        if any(with_reference) and not all(with_reference):
            raise ValueError(f"reference_logprobs are missing from row {with_reference.index(False)}, but other rows have them")
        prompts = [torch.tensor(item.rollout.prompt.token_ids, dtype=torch.long) for item in rollouts]
        lengths = torch.tensor([len(item) for item in rollouts])
        prompt_lengths = torch.tensor([len(ids) for ids in prompts])

        def pad(rows: Sequence[Tensor], value: float = 0, side: str = "right") -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)

        columns = torch.arange(int(lengths.max()))
        prompt_columns = torch.arange(int(prompt_lengths.max())).flip(0)
        return cls(
            prompt_ids=pad(prompts, pad_id, "left"),
            prompt_mask=prompt_columns[None] < prompt_lengths[:, None],
            response_ids=pad([item.rollout.response_ids for item in rollouts], pad_id),
            mask=columns[None] < lengths[:, None],
            old_logprobs=pad([item.old_logprobs for item in rollouts]),
            teacher_logprobs=pad([item.teacher_logprobs for item in rollouts]),
            rollout_logprobs=pad([item.rollout.rollout_logprobs for item in rollouts]) if correct_rollouts else None,
            reference_logprobs=pad([item.reference_logprobs for item in rollouts if item.reference_logprobs is not None])
            if all(with_reference)
            else None,
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
        if not self.skipped:
            for name in ("loss", "grad_norm"):
                if not math.isfinite(getattr(self, name)):
                    raise ValueError(f"StepStats.{name} of step {self.step} is {getattr(self, name)}, yet it was not skipped")


@dataclass(frozen=True, eq=False)
class EvalResult:
    """One model on one task."""

    task: str
    problem_ids: tuple[str, ...]
    """N ids, unique."""
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


def _check_ids(name: str, ids: Tensor, mask: Tensor | None = None) -> None:
    if ids.dtype != torch.long:
        raise TypeError(f"{name} must be int64, got {ids.dtype}")
    if mask is None:
        if ids.dim() != 1:
            raise ValueError(f"{name} must have shape [T], got {list(ids.shape)}")
        mask = torch.ones_like(ids, dtype=torch.bool)
    elif ids.shape != mask.shape:
        raise ValueError(f"{name} has shape {list(ids.shape)}, its mask {list(mask.shape)}")
    _refuse(name, ids, (ids < 0) & mask)


def _check_logprobs(name: str, values: Tensor, shape: torch.Size, mask: Tensor | None = None) -> None:
    if values.shape != shape:
        raise ValueError(f"{name} has shape {list(values.shape)}, expected {list(shape)}")
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64, got {values.dtype}")
    bad = ~torch.isfinite(values)
    _refuse(name, values, bad if mask is None else bad & mask)


def _check_padding(name: str, mask: Tensor, side: Literal["left", "right"]) -> None:
    before, after = (mask[:, :-1], mask[:, 1:]) if side == "right" else (mask[:, 1:], mask[:, :-1])
    broken = (after & ~before).any(-1)
    if broken.any():
        raise ValueError(
            f"{name} is not {side}-padded in row {int(broken.nonzero()[0])}: a valid token lies beyond an invalid one"
        )


def _refuse(name: str, values: Tensor, bad: Tensor) -> None:
    if bad.any():
        where = [int(i) for i in bad.nonzero()[0]]
        place = f"row {where[0]}, token {where[1]}" if len(where) == 2 else f"token {where[0]}"
        raise ValueError(f"{name} is {values[tuple(where)].item()} at {place}")

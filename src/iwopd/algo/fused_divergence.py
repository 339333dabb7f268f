"""The weighted mean of divergences straight from hidden states: the [N, V] logits never exist, and none is computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from iwopd.algo._checks import Checks, check_mask
from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.head import Chunk, HeadGradients, OutputHead, Precision, row_chunks
from iwopd.algo.loss import check_denominator
from iwopd.algo.one_pass import Passed, check_results, everywhere, one_pass_loss
from iwopd.algo.row_divergences import FullDivergence, TopKDivergence
from iwopd.algo.views import NO_ID


@dataclass(frozen=True)
class DivergenceLoss:
    """What a divergence loss returns."""

    loss: Tensor
    """Sum of `weights * D` over the mask divided by the denominator, []; carries the gradient."""
    values: Tensor
    """D in the mask's shape, detached; 0 outside."""


def fused_divergence_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    kind: DivergenceKind,
    denominator: float | Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> DivergenceLoss:
    """`sum(weights * D) / denominator` over the mask, with D over the full vocabulary; the teacher is detached.

    `hidden` [..., H], `weight` [V, H], `teacher_hidden` [..., H'], `teacher_weight` [V', H'], `weights` and `mask` [...].
    Sizes and dtypes of the models may differ, the vocabulary (after `vocab_size`) may not. What each token's D is multiplied
    by is known before, so each chunk of rows makes its gradients before the next starts: four matrix products instead of
    six, two chunks of logits in memory. Padding takes no part.
    """
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    function = FullDivergence.build(head, hidden, teacher_hidden, teacher_weight, teacher_bias, vocab_size, kind)
    states = {"the hidden state": hidden, "the teacher's hidden state": teacher_hidden}
    return _loss(states, weight, bias, head, function, weights, mask, denominator, Checks())


def fused_top_k_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    rest: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    kind: DivergenceKind,
    denominator: float | Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> DivergenceLoss:
    """The same with D over K ids of each token and one bucket for the rest.

    `ids` and the teacher's `logprobs` there are [..., K], its log-prob `rest` of all other ids [...]; `NO_ID` marks an empty
    place, an id that stands twice is refused. The student's softmax is over the full vocabulary: three matrix products, one
    chunk of logits in memory. With all V ids this is the divergence over the full vocabulary.
    """
    check_mask(mask)
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    if ids.shape[:-1] != mask.shape or logprobs.shape != ids.shape or rest.shape != mask.shape:
        raise ValueError(
            f"ids {list(ids.shape)} and logprobs {list(logprobs.shape)} must be the mask's shape {list(mask.shape)} plus [K], "
            f"and rest {list(rest.shape)} must equal it"
        )
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    checks, flat = Checks(), ids.detach().reshape(mask.numel(), ids.shape[-1]).long()
    valid = (flat != NO_ID) & mask.reshape(-1, 1)
    theirs = logprobs.detach().reshape(flat.shape).to(head.dtype)
    _check_support(checks, flat, valid, theirs, len(head.weight))
    checks.tokens("rest", rest.to(head.dtype), mask, finite=False)
    function = TopKDivergence(flat, valid, theirs, rest.detach().reshape(-1).to(head.dtype), kind)
    return _loss({"the hidden state": hidden}, weight, bias, head, function, weights, mask, denominator, checks)


def _check_support(checks: Checks, ids: Tensor, valid: Tensor, logprobs: Tensor, vocabulary: int) -> None:
    """Learn to refuse ids [N, K] that do not exist or stand twice, and log-probs that are none."""

    def outside() -> ValueError:
        found = ids[valid]
        return ValueError(
            f"a support holds ids {int(found.min())}..{int(found.max())}; the vocabulary ends at {vocabulary - 1}"
        )

    def twice() -> ValueError:
        row, place = (int(i) for i in again.nonzero()[0])
        return ValueError(f"id {int(ordered[row, place])} stands twice in the support of token {row}; give each id once")

    checks.refuse(valid & ((ids < 0) | (ids >= vocabulary)), outside)
    ordered = torch.where(valid, ids, NO_ID).sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_ID)
    checks.refuse(again, twice)
    checks.tokens("the teacher's log-probs", logprobs, valid, finite=False)


class _RowDivergence(Protocol):
    """`FullDivergence` or `TopKDivergence`."""

    @property
    def spare(self) -> int:
        """[R, V] buffers for a teacher's logits."""

    def value_and_gradient(self, chunk: Chunk, upstream: Tensor) -> tuple[Tensor, Tensor]: ...


def _loss(
    states: dict[str, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    head: OutputHead,
    function: _RowDivergence,
    weights: Tensor,
    mask: Tensor,
    denominator: float | Tensor,
    checks: Checks,
) -> DivergenceLoss:
    """The part that both share; the student's hidden states are the first of `states`."""
    hidden = next(iter(states.values()))
    check_mask(mask)
    check_denominator(denominator)
    if hidden.shape[:-1] != mask.shape:
        raise ValueError(f"hidden {list(hidden.shape)} must be the mask's shape {list(mask.shape)} plus [H]")
    checks.tokens("weights", weights, mask)
    checks.settle()
    rows = mask.reshape(-1).nonzero().squeeze(1)
    task = _Task(head, rows, function, weights.detach().reshape(-1)[rows].to(head.dtype) / denominator)
    loss, found = one_pass_loss(hidden, weight, bias, task)
    values = everywhere(found, rows, mask)
    check_results({"the divergence": values}, states, mask)
    return DivergenceLoss(loss, values)


@dataclass(frozen=True)
class _Task:
    head: OutputHead
    index: Tensor
    """[N] valid rows of the hidden states."""
    function: _RowDivergence
    upstream: Tensor
    """[N] derivative of the loss by each D."""

    def run(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> Passed:
        gradients = HeadGradients.allocate(hidden, weight, bias, needs)
        values = torch.empty_like(self.upstream)
        spare = self.function.spare
        for chunk in row_chunks(self.head, hidden, self.index, spare, two_heads=spare > 0):
            values[chunk.rows], dlogits = self.function.value_and_gradient(chunk, self.upstream[chunk.rows, None])
            if gradients.any:
                gradients.add(self.head, chunk, dlogits)
        return (values * self.upstream).sum(), (values,), gradients

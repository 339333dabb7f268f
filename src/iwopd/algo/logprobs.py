"""Log-probs, entropies and divergences straight from hidden states and the output matrix, in bounded memory.

All take hidden states with any leading dimensions `[..., H]` and an output matrix `[V, H]`, work through the tokens in
chunks (`algo.head`) and recompute a chunk's logits in the backward pass, so a [T, V] tensor never exists. Softmaxes are
over the full vocabulary, at the sampling `temperature`, in float32 or better; `precision` is that of the matrix products
alone. `vocab_size` leaves out the padding rows of the matrix: ids at or above it take no probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iwopd.algo._checks import LOGPROB_FLOOR, Checks, check_mask, check_tokens, keep
from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.head import Chunk, HeadGradients, OutputHead, Precision, row_chunks
from iwopd.algo.row_divergences import FullDivergence


class FlooredLogprobs(NamedTuple):
    logprobs: Tensor
    """Log-probs with -inf on valid tokens replaced by the floor, 0 outside the mask."""
    floored: int
    """How many were replaced: belongs into the metrics."""


@torch.no_grad()
def floor_logprobs(
    logprobs: Tensor, mask: Tensor, floor: float = LOGPROB_FLOOR, name: str = "teacher_logprobs"
) -> FlooredLogprobs:
    """Replace -inf on valid tokens by `floor`; NaN or +inf there is an error, finite values stay as they are."""
    check_mask(mask)
    check_tokens(name, logprobs, mask, finite=False)
    impossible = torch.isneginf(logprobs) & mask
    floored = keep(torch.where(impossible, floor, logprobs), mask)
    check_tokens(name, floored, mask)
    return FlooredLogprobs(floored, int(impossible.sum()))


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> Tensor:
    """Log-probs [...] of the given tokens `targets` [...]; differentiable in hidden states, matrix and bias.

    A target at or above `vocab_size` has log-prob -inf and no gradient. There is no mask here: padding needs some id that
    exists (0 will do).
    """
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets have shape {list(targets.shape)}, hidden states {list(hidden.shape)}")
    checks = Checks()
    ids = head.token_ids(targets, checks).reshape(-1).clone()  # kept for the backward pass
    checks.settle()
    return _through_head(hidden, weight, bias, head, _TargetLogprob(ids, len(head.weight)))


def token_entropy(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> Tensor:
    """Entropy [...] in nats of the next-token distribution; differentiable."""
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    return _through_head(hidden, weight, bias, head, _Entropy())


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: DivergenceKind,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> Tensor:
    """Full-vocabulary divergence [...] of student and teacher; differentiable in the student, the teacher is detached.

    Hidden sizes may differ, the vocabulary (after `vocab_size`) may not. To train on a weighted sum of them,
    `fused_divergence_loss` needs two matrix products less.
    """
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    function = FullDivergence.build(head, hidden, teacher_hidden, teacher_weight, teacher_bias, vocab_size, kind)
    return _through_head(hidden, weight, bias, head, function)


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    **options: Any,
) -> Tensor:
    """`token_divergence` of a KL, with its options.

    `reverse` is KL(student || teacher), the divergence whose single-sample estimate OPD optimises (the local D_t of
    the paper's Appendix A.3); `forward` is KL(teacher || student).
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got {direction!r}")
    kind = DivergenceKind(f"{direction}-kl")
    return token_divergence(hidden, weight, teacher_hidden, teacher_weight, kind=kind, **options)


class _RowFunction(Protocol):
    """A function of each token's logits. Both methods may overwrite the chunk's [R, V] tensors."""

    @property
    def spare(self) -> int:
        """How many [R, V] tensors of working memory it needs."""

    def value(self, chunk: Chunk) -> Tensor:
        """The function, [R]."""

    def gradient(self, chunk: Chunk, value: Tensor, upstream: Tensor) -> Tensor:
        """The derivative of `sum(upstream * value)` by the logits, [R, V]; `value` and `upstream` are [R, 1]."""


def _through_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, function: _RowFunction) -> Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    values: Tensor = _HeadFunction.apply(flat, weight, bias, head, function)  # type: ignore[no-untyped-call]
    return values.reshape(hidden.shape[:-1])


class _HeadFunction(torch.autograd.Function):
    """Apply a row function in chunks; the backward pass makes each chunk's logits once more."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, function: _RowFunction
    ) -> Tensor:
        ctx.head, ctx.function = head, function
        values = torch.empty(len(hidden), dtype=head.dtype, device=hidden.device)
        for chunk in row_chunks(head, hidden, spare=function.spare):
            values[chunk.rows] = function.value(chunk)
        ctx.save_for_backward(hidden, weight, bias, values)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, values = ctx.saved_tensors
        gradients = HeadGradients.allocate(hidden, weight, bias, list(ctx.needs_input_grad[:3]))
        # Tokens that nobody asks about (padding, usually) take no part: no work, and no NaN of theirs in the matrix.
        index = upstream.nonzero().squeeze(1)
        for chunk in row_chunks(ctx.head, hidden, index, spare=ctx.function.spare):
            dlogits = ctx.function.gradient(chunk, values[chunk.source, None], upstream[chunk.source, None])
            gradients.add(ctx.head, chunk, dlogits)
        return (*gradients.scaled(torch.ones((), device=hidden.device)), None, None)


@dataclass
class _TargetLogprob:
    """log p[target]; d / d logits = onehot(target) - p."""

    targets: Tensor
    vocabulary: int
    spare: int = 0

    def _targets(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        targets = self.targets[rows, None]
        possible = targets < self.vocabulary
        return torch.where(possible, targets, 0), possible

    def value(self, chunk: Chunk) -> Tensor:
        targets, possible = self._targets(chunk.source)
        picked = chunk.logits.gather(1, targets)
        largest = chunk.logits.amax(1, keepdim=True)
        total = chunk.logits.sub_(largest).exp_().sum(1, keepdim=True)
        # The largest logit first: picked - largest is exact where they are close, and that is where it matters.
        return torch.where(possible, picked - largest - total.log(), -torch.inf).squeeze(1)

    def gradient(self, chunk: Chunk, value: Tensor, upstream: Tensor) -> Tensor:
        targets, possible = self._targets(chunk.source)
        upstream = torch.where(possible, upstream, 0.0)
        scaled = chunk.logits.sub_(chunk.logits.amax(1, keepdim=True)).exp_()
        return scaled.mul_(-upstream / scaled.sum(1, keepdim=True)).scatter_add_(1, targets, upstream)


@dataclass
class _Entropy:
    """H = -sum p log p; d / d logits = -p * (log p + H)."""

    spare: int = 1

    def value(self, chunk: Chunk) -> Tensor:
        shifted = _shift_(chunk.logits)
        scaled = torch.exp(shifted, out=chunk.spare[0])
        total = scaled.sum(1)
        return total.log() - shifted.mul_(scaled).sum(1) / total

    def gradient(self, chunk: Chunk, value: Tensor, upstream: Tensor) -> Tensor:
        shifted = _shift_(chunk.logits)
        scaled = torch.exp(shifted, out=chunk.spare[0])
        total = scaled.sum(1, keepdim=True)
        return shifted.add_(value - total.log()).mul_(scaled).mul_(-upstream / total)


def _shift_(logits: Tensor) -> Tensor:
    """Logits minus their largest, in place. A banned id's -inf becomes a huge finite number: -inf * 0 would be NaN."""
    return logits.sub_(logits.amax(1, keepdim=True)).clamp_(min=torch.finfo(logits.dtype).min / 4)

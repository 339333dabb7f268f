"""Log-probs, entropies and divergences straight from hidden states and the output matrix, in bounded memory.

All take hidden states with any leading dimensions `[..., H]` and an output matrix `[V, H]`, work through the tokens in
chunks (`algo.head`) and recompute a chunk's logits in the backward pass, so a [T, V] tensor never exists. Softmaxes are
over the full vocabulary, at the sampling `temperature`, in float32 or better. `vocab_size` leaves out the padding rows
of the matrix: ids at or above it take no probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iwopd.algo._checks import check_mask, check_tokens
from iwopd.algo.head import HeadGradients, OutputHead, row_chunks

LOGPROB_FLOOR = -100.0
"""What a log-prob of -inf on a valid token counts as: bounded, and far below anything a model says by itself."""


class FlooredLogprobs(NamedTuple):
    logprobs: Tensor
    """Log-probs with -inf on valid tokens replaced by the floor."""
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
    floored = torch.where(impossible, floor, logprobs)
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
) -> Tensor:
    """Log-probs [...] of the given tokens `targets` [...]; differentiable in hidden states, matrix and bias.

    A target at or above `vocab_size` has log-prob -inf and no gradient.
    """
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size)
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets have shape {list(targets.shape)}, hidden states {list(hidden.shape)}")
    ids = head.check_targets(targets).reshape(-1)
    return _through_head(hidden, weight, bias, head, _TargetLogprob(ids, len(head.weight)))


def token_entropy(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Entropy [...] in nats of the next-token distribution; differentiable."""
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size)
    return _through_head(hidden, weight, bias, head, _Entropy())


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Full-vocabulary KL [...] between student and teacher; differentiable in the student, the teacher is detached.

    `reverse` is KL(student || teacher), the divergence whose single-sample estimate OPD optimises (the local D_t of
    the paper's Appendix A.3); `forward` is KL(teacher || student). Hidden sizes may differ, the vocabulary (after
    `vocab_size`) may not.
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got {direction!r}")
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size)
    teacher = OutputHead.build(teacher_hidden, teacher_weight, teacher_bias, temperature, vocab_size)
    if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
        raise ValueError(f"student has tokens {list(hidden.shape[:-1])}, teacher {list(teacher_hidden.shape[:-1])}")
    if len(head.weight) != len(teacher.weight):
        raise ValueError(
            f"student vocabulary has {len(head.weight)} ids, teacher {len(teacher.weight)}: pass vocab_size, the number "
            "of ids that both share"
        )
    flat = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    return _through_head(hidden, weight, bias, head, _KL(teacher, flat, direction))


class _RowFunction(Protocol):
    """A function of each token's logits. Both methods may overwrite the logits [R, V] they are given."""

    buffers: int

    def value(self, rows: slice, logits: Tensor) -> Tensor: ...

    def gradient(self, rows: slice, logits: Tensor, upstream: Tensor) -> Tensor:
        """The derivative of `sum(upstream * value)` by the logits, [R, V]."""
        ...


def _through_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, function: _RowFunction) -> Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    values: Tensor = _HeadFunction.apply(flat, weight, bias, head, function)
    return values.reshape(hidden.shape[:-1])


class _HeadFunction(torch.autograd.Function):
    """Apply a row function in chunks; the backward pass makes each chunk's logits once more."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, function: _RowFunction
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head, ctx.function = head, function
        values = torch.empty(len(hidden), dtype=head.dtype, device=hidden.device)
        for chunk in row_chunks(head, hidden, buffers=function.buffers):
            values[chunk.rows] = function.value(chunk.rows, chunk.logits)
        return values

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        gradients = HeadGradients.allocate(hidden, weight, bias, list(ctx.needs_input_grad[:3]))
        for chunk in row_chunks(ctx.head, hidden, buffers=ctx.function.buffers):
            dlogits = ctx.function.gradient(chunk.rows, chunk.logits, upstream[chunk.rows, None])
            gradients.add(ctx.head, chunk, dlogits)
        return (*gradients.scaled(torch.ones((), device=hidden.device)), None, None)


@dataclass
class _TargetLogprob:
    """log p[target]; d / d logits = onehot(target) - p."""

    targets: Tensor
    vocabulary: int
    buffers: int = 1

    def _targets(self, rows: slice) -> tuple[Tensor, Tensor]:
        targets = self.targets[rows, None]
        possible = targets < self.vocabulary
        return torch.where(possible, targets, 0), possible

    def value(self, rows: slice, logits: Tensor) -> Tensor:
        targets, possible = self._targets(rows)
        picked = logits.gather(1, targets)
        largest = logits.amax(1, keepdim=True)
        total = logits.sub_(largest).exp_().sum(1, keepdim=True)
        # The largest logit first: picked - largest is exact where they are close, and that is where it matters.
        return torch.where(possible, picked - largest - total.log(), -torch.inf).squeeze(1)

    def gradient(self, rows: slice, logits: Tensor, upstream: Tensor) -> Tensor:
        targets, possible = self._targets(rows)
        upstream = torch.where(possible, upstream, 0.0)
        total = logits.sub_(logits.amax(1, keepdim=True)).exp_().sum(1, keepdim=True)
        return logits.mul_(-upstream / total).scatter_add_(1, targets, upstream)


@dataclass
class _Entropy:
    """H = -sum p log p; d / d logits = -p * (log p + H)."""

    buffers: int = 2

    def value(self, rows: slice, logits: Tensor) -> Tensor:
        logprobs = _log_softmax_(logits)
        return -torch.linalg.vecdot(logprobs.exp(), logprobs)

    def gradient(self, rows: slice, logits: Tensor, upstream: Tensor) -> Tensor:
        logprobs = _log_softmax_(logits)
        probabilities = logprobs.exp()
        entropy = -torch.linalg.vecdot(probabilities, logprobs)
        return logprobs.add_(entropy[:, None]).mul_(probabilities).mul_(-upstream)


@dataclass
class _KL:
    """KL(p || q) = sum p (log p - log q) of student p and teacher q, or KL(q || p).

    d / d student's logits: `p * (log p - log q - KL)` for the first, `p - q` for the second.
    """

    teacher: OutputHead
    teacher_hidden: Tensor
    direction: str
    buffers: int = 3

    def _logprobs(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self.teacher.logits(self.teacher_hidden[rows], torch.empty_like(logits, dtype=self.teacher.dtype))
        return _log_softmax_(logits), _log_softmax_(teacher).to(logits.dtype)

    def value(self, rows: slice, logits: Tensor) -> Tensor:
        student, teacher = self._logprobs(rows, logits)
        if self.direction == "reverse":
            difference = torch.sub(student, teacher, out=teacher)
            return torch.linalg.vecdot(student.exp_(), difference)
        difference = torch.sub(teacher, student, out=student)
        return torch.linalg.vecdot(teacher.exp_(), difference)

    def gradient(self, rows: slice, logits: Tensor, upstream: Tensor) -> Tensor:
        student, teacher = self._logprobs(rows, logits)
        if self.direction == "reverse":
            difference = torch.sub(student, teacher, out=teacher)
            probabilities = student.exp_()
            divergence = torch.linalg.vecdot(probabilities, difference)
            return difference.sub_(divergence[:, None]).mul_(probabilities).mul_(upstream)
        return student.exp_().sub_(teacher.exp_()).mul_(upstream)


def _log_softmax_(logits: Tensor) -> Tensor:
    """Log-softmax over the last dimension in place, with one buffer of working memory."""
    logits.sub_(logits.amax(1, keepdim=True))
    return logits.sub_(logits.exp().sum(1, keepdim=True).log_())

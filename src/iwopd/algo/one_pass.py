"""Losses whose derivative by a token's logits needs that token alone: value and gradients in one pass over the head.

The forward pass makes each chunk's logits once and turns them into gradients at once; `backward` hands these on. Against a
backward pass that makes the logits again this saves a matrix product for each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iwopd.algo._checks import Checks, NonFiniteError, check_tokens
from iwopd.algo.head import HeadGradients

Passed = tuple[Tensor, tuple[Tensor | None, ...], HeadGradients]
"""The loss [], what else is known of the tokens (detached), and the gradients of the loss."""


class OnePass(Protocol):
    """A loss, with everything that is known before the logits are."""

    def run(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> Passed:
        """Of hidden states [N, H], output matrix [V, H] and bias [V]; gradients of those that are needed."""


def one_pass_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: OnePass) -> tuple[Any, ...]:
    """The loss [], which carries gradients into hidden states [..., H], matrix and bias; then what else the pass found.

    A second backward pass through a retained graph computes the gradients again.
    """
    flat, grad = hidden.reshape(-1, hidden.shape[-1]), torch.is_grad_enabled()
    found: tuple[Any, ...] = _OnePassLoss.apply(flat, weight, bias, task, grad)  # type: ignore[no-untyped-call]
    return found


class _OnePassLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: OnePass, grad: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.task = task
        needs = [grad and need for need in ctx.needs_input_grad[:3]]
        loss, found, ctx.gradients = task.run(hidden, weight, bias, needs)
        ctx.mark_non_differentiable(*(values for values in found if values is not None))
        return (loss, *found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        # Let go of the buffers, so that the engine takes them over instead of copying them.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = ctx.task.run(hidden, weight, bias, list(ctx.needs_input_grad[:3]))[2]
        return (*gradients.scaled(grad_loss), None, None)


def everywhere(values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Values [N] of the tokens `rows` of a flattened mask, in its shape; 0 elsewhere."""
    return values.new_zeros(mask.numel()).index_copy(0, rows, values).reshape(mask.shape)


@torch.no_grad()
def check_results(results: Mapping[str, Tensor], states: Mapping[str, Tensor], mask: Tensor) -> None:
    """Refuse results of the mask's shape that are no numbers; name the hidden states [..., H], if they are the cause."""
    checks = Checks()
    for name, values in results.items():
        checks.tokens(name, values, mask)
    try:
        checks.settle()
    except NonFiniteError:
        for name, hidden in states.items():
            worst = hidden.to(torch.float32).abs().amax(-1) if hidden.shape[-1] else hidden.new_zeros(mask.shape)
            check_tokens(name, worst, mask)
        raise

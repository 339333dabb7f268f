"""The weights that the optimizer works on, and how they reach the student.

A weight in half precision holds 8 bits: most of Adam's steps are smaller than half of its last one and would be lost. So the
optimizer works on a float32 copy of it, its master: gradients are added up there, and after a step the weight is the rounded
master. Weights in float32 are trained in place. `sharding` has the other kind, which is spread over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from iwopd.lm import ResponseModel
from iwopd.train.ranks import Ranks

HALF = (torch.bfloat16, torch.float16)


class Weights:
    """The trained weights of a student that every process holds whole."""

    in_step = False
    """Whether every process must run as many micro-batches as the others, because they exchange weights while they run."""

    def __init__(self, lm: ResponseModel, ranks: Ranks) -> None:
        self.lm, self.ranks = lm, ranks
        """`lm` is what the update runs."""
        self._half = {number: parameter for number, parameter in enumerate(trained(lm.model)) if parameter.dtype in HALF}
        self.masters = {number: nn.Parameter(parameter.detach().float()) for number, parameter in self._half.items()}
        """Float32 copies of weights in half precision, by their numbers among the trained ones."""
        self.parameters = [self.masters.get(number, parameter) for number, parameter in enumerate(trained(lm.model))]
        """What the optimizer works on."""
        for number, parameter in self._half.items():
            parameter.register_post_accumulate_grad_hook(_hand_over_to(self.masters[number]))

    def adopt(self, loss: nn.Module) -> None:
        """`loss` is the module that the update calls; the model is a part of it."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the optimizer steps of a batch. Afterwards the student has the new weights."""
        yield

    def current(self) -> Iterator[Tensor]:
        """What the optimizer has made of the trained weights, in their order, each whole. All processes take part."""
        yield from self.parameters

    def sum_gradients(self) -> None:
        """Make the gradients those of all processes."""
        self.ranks.sum_gradients(self.parameters)

    def gradient_norm(self) -> Tensor:
        """[]: of all gradients as one vector."""
        return torch.nn.utils.get_total_norm([one.grad for one in self.parameters if one.grad is not None])

    @torch.no_grad()
    def stepped(self) -> None:
        """After an optimizer step: weights in half precision follow their masters."""
        for number, parameter in self._half.items():
            parameter.copy_(self.masters[number])

    @torch.no_grad()
    def follow_student(self) -> None:
        """Start from the student's weights of this moment, which somebody else has changed."""
        for number, parameter in self._half.items():
            self.masters[number].copy_(parameter)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of a model, in the order in which an optimizer and its checkpoints number them."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Adds the gradient of a micro-batch to the master's, in float32, and frees it."""

    def hand_over(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hand_over

"""Several processes: each samples and scores its share of the rollouts, all see the whole batch, gradients are summed.

Every rank holds the model. The rollouts of a step are gathered, so that weights, mini-batches and the loss's denominator
are those of the whole batch on every rank, whatever their number; then each rank works through its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from iwopd.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ranks:
    """This process among its peers; alone if `torch.distributed` was not initialised."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.count = dist.get_world_size() if together else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]) -> list[Result]:
        """`work(items)`, each rank doing every n-th item; `work` returns the same number of results for every item.

        A `UserError` of one rank is raised on all of them: none is left waiting for it.
        """
        if self.count == 1:
            return work(items)
        mine: list[Result] = []
        fault = None
        try:
            mine = work(items[self.rank :: self.count])
        except UserError as error:
            fault = error
        everyone = self.gather((mine, fault))
        if faults := [other for _, other in everyone if other is not None]:
            raise fault or faults[0]
        parts = [part for part, _ in everyone]
        each = sum(map(len, parts)) // max(1, len(items))
        results: list[Result] = []
        for place in range(len(items)):
            row, owner = divmod(place, self.count)
            results += parts[owner][row * each : (row + 1) * each]
        return results

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all ranks. The loss has one global denominator, so the sum is the whole gradient."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def gather(self, value: Item) -> list[Item]:
        """The values of all ranks, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def leave(self, *, together: bool) -> None:
        """Give the process group up: gloo's threads may abort a process that ends with it. `together`: wait for the others."""
        if self.count > 1 and dist.is_initialized():  # a group of one, or one that came later, is an engine's own
            if together:
                dist.barrier()
            dist.destroy_process_group()

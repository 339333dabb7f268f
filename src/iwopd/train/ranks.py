"""Several processes: each samples and scores its share of the rollouts, all see the whole batch, gradients are summed.

Every rank holds the student; of what is trained perhaps a part (`sharding`). The rollouts of a step are gathered, so that
weights, mini-batches and the loss's denominator are those of the whole batch on every rank, whatever their number; then each
rank works through its own rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from iwopd.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class RanksError(UserError, RuntimeError):
    """Processes that have lost each other."""


@dataclass(frozen=True)
class Launched:
    """Processes that were started together."""

    count: int
    here: int
    """On this machine."""
    number: int = 0
    """Of this one, among those of the machine."""


def launched() -> Launched:
    """What torchrun or `accelerate launch` has told this process: known before any of them speaks to another."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return Launched(count, int(os.environ.get("LOCAL_WORLD_SIZE", count)), int(os.environ.get("LOCAL_RANK", "0")))


def lost_contact(error: RuntimeError, patience: float) -> RanksError | None:
    """In words what gloo or NCCL failed with, if it was they; `patience` is the setting `rank_timeout`."""
    text = str(error)
    if isinstance(error, UserError) or not (isinstance(error, dist.DistError) or "gloo" in text):
        return None
    who = f"process {os.environ.get('RANK', '0')} of {launched().count}"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return RanksError(
            f"{who} waited {patience:g} seconds for another one (rank_timeout) and heard nothing: the other hangs, or its "
            "answers take so much longer. If its own output shows no error, raise rank_timeout or lower rollout.max_tokens, "
            "and continue with --resume"
        )
    return RanksError(f"{who} has lost another one, whose own output says why: {text.splitlines()[0]}")


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
        """`work(items)`, each rank doing every n-th item; `work` returns the same number of results for every item."""
        parts = self.gather(self.together(lambda: work(items[self.rank :: self.count])))
        each = sum(map(len, parts)) // max(1, len(items))
        results: list[Result] = []
        for place in range(len(items)):
            row, owner = divmod(place, self.count)
            results += parts[owner][row * each : (row + 1) * each]
        return results

    def together(self, work: Callable[[], Result]) -> Result:
        """`work()` on every rank; returns its own result when all are done.

        A `UserError` of one rank is raised on all of them: none is left waiting for it.
        """
        fault: UserError | None = None
        done: list[Result] = []
        try:
            done.append(work())
        except UserError as error:
            fault = error
        if faults := [other for other in self.gather(fault) if other is not None]:
            raise fault or faults[0]
        return done[0]

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

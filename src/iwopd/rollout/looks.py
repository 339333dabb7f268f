"""A watcher's looks at answers that the local sampler is writing.

Rows come in only at the beginning of a block (`may_join`), so all rows under way reach the ends of their blocks together, and
the watcher sees many answers at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from iwopd.rollout.sampler import Watcher
from iwopd.types import Piece, Prompt

Drawn = tuple[Tensor, Tensor, Tensor]
"""Rows, ids and log-probs [n] of one draw."""


class Looks:
    """What was written since the last look at each row."""

    def __init__(
        self, watcher: Watcher, prompt_of: Callable[[int], Prompt], outside: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`outside`: the context in which a watcher may compute, in the midst of writing."""
        self._watcher, self._prompt_of, self._outside = watcher, prompt_of, outside
        self.block = watcher.next_look(0)
        self._drawn: list[Drawn] = []
        self._pending: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._next: dict[int, int] = {}
        self._ended: list[int] = []
        self.stopped: set[int] = set()
        """Rows that the watcher has stopped."""

    def may_join(self, lengths: Tensor) -> bool:
        """Whether newcomers, who draw their first token at once, would be in step with rows of these lengths."""
        return len(lengths) == 0 or (int(lengths[0]) - 1) % self.block == 0

    def is_due(self, lengths: Tensor) -> bool:
        return len(lengths) == 0 or int(lengths[0]) % self.block == 0

    def drawn(self, rows: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        self._drawn.append((rows, ids, logprobs))

    def ended(self, rows: Tensor) -> None:
        self._ended += rows.tolist()

    def look(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Which of the rows under way [n] stop."""
        self._collect()
        due = []
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            if self._next.setdefault(row, self.block) == length:
                self._next[row] = self._watcher.next_look(length)
                due.append(row)
        pieces = [self._piece(row, ended=True) for row in self._ended] + [self._piece(row, ended=False) for row in due]
        self._ended = []
        if pieces:
            with self._outside():
                found = list(zip(pieces, self._watcher.look(pieces), strict=True))
            self.stopped |= {piece.row for piece, stops in found if stops and not piece.ended}
        return torch.tensor([row in self.stopped for row in rows.tolist()], dtype=torch.bool)

    def _collect(self) -> None:
        """Sort what was drawn by rows."""
        if not self._drawn:
            return
        rows, ids, logprobs = (torch.cat(values) for values in zip(*self._drawn, strict=True))
        self._drawn = []
        order = rows.argsort(stable=True)  # within a row: as they were drawn
        numbers, counts = rows.unique(return_counts=True)
        with torch.inference_mode(False):  # whoever looks may keep them
            own = [values.cpu()[order].clone().split(counts.tolist()) for values in (ids, logprobs)]
        for row, *values in zip(numbers.tolist(), *own, strict=True):
            self._pending.setdefault(row, []).append((values[0], values[1]))

    def _piece(self, row: int, *, ended: bool) -> Piece:
        ids, logprobs = (torch.cat(values) for values in zip(*self._pending.pop(row), strict=True))
        return Piece(row, self._prompt_of(row), ids, logprobs, ended)

"""A key/value cache of fixed size: allocated once, and then written in place. Nothing here makes a copy of it, or of a part.

Rows are right-aligned: each step writes the same column in every row, and a row whose prompt is shorter, or which came later,
begins further right. Rows that leave have the last ones moved into their places. At the right end all rows slide to the left.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

MOST_SLACK = 1024


def slack(width: int) -> int:
    """Columns beside the `width` of the longest row, where rows come and go: at the end all rows can slide by so many."""
    return min(MOST_SLACK, max(1, width // 8))


class Store:
    """Which rows and columns of some tensors [..., rows, heads, columns, D] are in use: the same ones of all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.rows, _, self.columns, _ = tensors[0].shape[-4:]
        self.clear()

    def clear(self) -> None:
        self.starts: list[int] = []
        """First column of each row."""
        self.last = 0
        """Columns that are written: the next token of every row goes here."""
        self.first = 0
        """First column that any row uses."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def used(self) -> slice:
        """Columns that attention sees."""
        return slice(self.first, self.last)

    @property
    def padded(self) -> bool:
        """Whether some row sees less than these."""
        return max(self.starts, default=self.first) > self.first

    def join(self, length: int, lengths: Sequence[int]) -> tuple[slice, slice]:
        """Rows and columns for newcomers with prompts of these `lengths`, padded on the left to `length`."""
        count = len(self.starts)
        if count + len(lengths) > self.rows:
            raise ValueError(f"no room for {len(lengths)} more rows beside {count}: there is room for {self.rows}")
        if count == 0:
            self.first, self.last = 0, length
        elif length > self.last:
            raise ValueError(f"a prompt of {length} tokens cannot join rows of {self.last}; admit long prompts first")
        rows, columns = slice(count, count + len(lengths)), slice(self.last - length, self.last)
        left = min(self.first, columns.start)
        # Attention multiplies what it does not see by 0, so it must be finite.
        for unseen in ((rows, slice(left, columns.start)), (slice(0, count), slice(left, self.first))):
            for tensor in self.tensors:
                tensor[..., unseen[0], :, unseen[1], :] = 0
        self.starts += [self.last - own for own in lengths]
        self.first = min(self.starts)
        return rows, columns

    def advance(self) -> int:
        """The column of every row's next token."""
        if self.last == self.columns:
            self._slide()
        self.last += 1
        return self.last - 1

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows; only the last ones move, to the places of those that leave."""
        for place, origin in enumerate(order):
            if place != origin:
                if origin < len(order):
                    raise ValueError(f"row {origin} cannot move to {place}: of {len(order)} rows that stay, it keeps its place")
                for tensor in self.tensors:
                    tensor[..., place, :, self.used, :] = tensor[..., origin, :, self.used, :]
        self.starts = [self.starts[row] for row in order]
        self.first = min(self.starts)

    def _slide(self) -> None:
        """Move everything to the left end, piece by piece: a piece is no wider than the way, so that it needs no copy."""
        way = self.first
        if not way:
            raise ValueError(f"a row needs more than the {self.columns} columns of the cache")
        for start in range(0, self.last - way, way):
            stop = min(start + way, self.last - way)
            for tensor in self.tensors:
                tensor[..., : len(self), :, start:stop, :] = tensor[..., : len(self), :, start + way : stop + way, :]
        self.starts = [start - way for start in self.starts]
        self.first, self.last = 0, self.last - way

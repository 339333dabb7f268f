"""The books of the pretend GPU's memory: a caching allocator without memory.

It follows torch's CUDA allocator: sizes are rounded up to 512 bytes, blocks are cut from segments that the driver hands out
(2 MB for small blocks, 20 MB for middling ones, whole multiples of 2 MB for large ones), a freed block stays reserved until it
is used again or `empty_cache` gives back a segment that is wholly free.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

import torch

ROUND = 512
SMALL = 2**20
"""Blocks up to here come from small segments."""
SMALL_SEGMENT = 2 * 2**20
MIDDLING = 10 * 2**20
"""Blocks below come from middling segments, others from segments of their own."""
MIDDLING_SEGMENT = 20 * 2**20

_numbers = itertools.count()


@dataclass(eq=False)
class Block:
    """A piece of a segment, between its neighbours there."""

    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.number


@dataclass
class Ledger:
    """What is allocated, reserved and the most that was, in bytes."""

    total: int
    peak: int = 0
    """Most bytes allocated since `reset_peak`."""
    peak_reserved: int = 0
    _allocated: int = 0
    _reserved: int = 0
    _dead: deque[Block] = field(default_factory=deque, repr=False)
    """Blocks whose tensors are gone: Python may tell of them at any moment, in the middle of an entry here."""
    _free: dict[bool, list[Block]] = field(default_factory=lambda: {True: [], False: []}, repr=False)
    """Small and other blocks that wait to be used again, the smallest first."""

    def reset_peak(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    @property
    def allocated(self) -> int:
        self._settle()
        return self._allocated

    @property
    def reserved(self) -> int:
        self._settle()
        return self._reserved

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes; out of memory if there is no room even after giving back free segments."""
        self._settle()
        size = max(1, -(-size // ROUND)) * ROUND
        block = self._find(size) or self._new_segment(size)
        self._split(block, size)
        self._allocated += block.size
        self.peak = max(self.peak, self._allocated)
        return block

    def release(self, block: Block) -> None:
        """The block stays reserved."""
        self._dead.append(block)

    def _settle(self) -> None:
        while self._dead:
            self._release(self._dead.popleft())

    def _release(self, block: Block) -> None:
        """Free neighbours become one block with it."""
        self._allocated -= block.size
        if block.after is not None and block.after.free:
            self._swallow(block, self._take(block.after))
        if block.before is not None and block.before.free:
            block, swallowed = self._take(block.before), block
            self._swallow(block, swallowed)
        self._put(block)

    def empty_cache(self) -> None:
        """Give wholly free segments back to the driver."""
        self._settle()
        for blocks in self._free.values():
            whole = [block for block in blocks if block.before is None and block.after is None]
            self._reserved -= sum(block.size for block in whole)
            blocks[:] = [block for block in blocks if block not in whole]

    def _find(self, size: int) -> Block | None:
        """The smallest free block of the right kind that is large enough."""
        blocks = self._free[size <= SMALL]
        place = bisect_left(blocks, (size, -1), key=lambda block: block.key)
        return self._take(blocks[place]) if place < len(blocks) else None

    def _new_segment(self, size: int) -> Block:
        if size <= SMALL:
            room = SMALL_SEGMENT
        else:
            room = MIDDLING_SEGMENT if size < MIDDLING else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        if self.reserved + room > self.total:
            self.empty_cache()
        if self.reserved + room > self.total:
            raise torch.OutOfMemoryError(
                f"pretend GPU out of memory. Tried to allocate {size} bytes (a segment of {room}): of {self.total} bytes "
                f"{self.allocated} are allocated and {self.reserved} reserved"
            )
        self._reserved += room
        self.peak_reserved = max(self.peak_reserved, self._reserved)
        return Block(room, small=size <= SMALL)

    def _split(self, block: Block, size: int) -> None:
        """Leave what `block` has beyond `size` free, if it is worth a block of its own."""
        rest = block.size - size
        if rest < ROUND if block.small else rest <= SMALL:
            return
        block.size = size
        left = Block(rest, block.small, block, block.after)
        if block.after is not None:
            block.after.before = left
        block.after = left
        self._put(left)

    def _swallow(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], block, key=lambda one: one.key)

    def _take(self, block: Block) -> Block:
        block.free = False
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, block.key, key=lambda one: one.key)]
        return block

"""A cache layer with room to grow, for the model's own forward. Imports transformers, so it is itself imported late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

FIRST_COLUMNS = 64
"""Columns that are allocated ahead at first; grows by half."""


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """`DynamicLayer` copies the whole cache at every token; this one writes the token into space left free on the right.

    Rows leave by having the last ones moved into their places, columns that only hold padding by moving `first`. What a
    model sees (`keys`, `values`: [n, heads, W, D]) are views.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._show((keys, values), len(keys), 0, keys.shape[2])

    def _show(self, buffers: tuple[Tensor, Tensor], rows: int, first: int, last: int) -> None:
        self.buffers, self.rows, self.first, self.last = buffers, rows, first, last
        self.keys, self.values = (buffer[:rows, :, first:last] for buffer in buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, [n, heads, tokens, D]."""
        new = key_states.shape[2]
        if self.last + new > self.buffers[0].shape[2]:
            width = self.last - self.first
            room = (0, 0, 0, new + max(FIRST_COLUMNS, width // 2))
            grown = (torch.nn.functional.pad(self.keys, room), torch.nn.functional.pad(self.values, room))
            self._show(grown, self.rows, 0, width)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, self.last : self.last + new] = states
        self._show(self.buffers, self.rows, self.first, self.last + new)
        return self.keys, self.values

    def select(self, moved: Tensor, origin: Tensor, rows: int) -> None:
        """Move rows `origin` to the places `moved`, then keep the first `rows`."""
        if len(moved):
            for values in (self.keys, self.values):
                values[moved] = values[origin]
        self._show(self.buffers, rows, self.first, self.last)

    def trim(self, unused: int) -> None:
        self._show(self.buffers, self.rows, self.first + unused, self.last)

    def join(self, other: RoomyLayer) -> None:
        """Append the rows of `other`, aligned on the right."""
        width = max(self.keys.shape[2], other.keys.shape[2])
        pairs = ((self.keys, other.keys), (self.values, other.values))
        keys, values = (torch.cat((_widen(old, width), _widen(new, width))) for old, new in pairs)
        self._show((keys, values), len(keys), 0, width)


def make_roomy(cache: Any) -> bool:
    """Replace the layers of a plain `DynamicCache`; leave others (sliding windows, recurrent states) alone and return False."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer) is not DynamicLayer or layer.keys is None for layer in layers):
        return False
    cache.layers = [RoomyLayer(layer.keys, layer.values) for layer in layers]
    return True


def _widen(values: Tensor, width: int) -> Tensor:
    """`values` [n, heads, W, D] with empty columns on the left; masked later, but they must be finite."""
    return torch.nn.functional.pad(values, (0, 0, width - values.shape[2], 0))

"""A cache layer of fixed size for the model's own forward. Imports transformers, so it is itself imported late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """`DynamicLayer` copies the whole cache at every token; this one writes the token into a place of tensors that stay.

    Which place, a `store.Store` says. What a model sees (`keys`, `values`: [n, heads, W, D]) are views.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, key: Tensor, value: Tensor, rows: int, columns: int) -> None:
        """Room for `rows` x `columns` tokens like the one of `key` and `value`, [1, heads, 1, D]."""
        super().__init__()
        self.device = key.device
        self.dtype = key.dtype
        # Attention would round keys and values to autocast's dtype anyway; so they take half the room.
        if torch.is_autocast_enabled(self.device.type):
            self.dtype = torch.get_autocast_dtype(self.device.type)
        self.is_initialized = True
        self.tensors = [like.new_empty(rows, like.shape[1], columns, like.shape[3], dtype=self.dtype) for like in (key, value)]
        self.show(slice(0, 0), slice(0, 0))

    def show(self, rows: slice, used: slice) -> None:
        """The next pass adds tokens to these rows, after these columns."""
        self._rows, self._used = rows, used
        self._source: Tensor | None = None
        self.keys, self.values = (tensor[rows, :, used] for tensor in self.tensors)

    def read(self, rows: slice, columns: slice, source: Tensor) -> None:
        """The next pass reads prompts, which see nothing but themselves; row j of `rows` keeps prompt `source[j]`."""
        self.show(rows, slice(columns.start, columns.start))
        self._source = source

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, [n, heads, tokens, D]."""
        begin, end = self._used.stop, self._used.stop + key_states.shape[2]
        for tensor, states in zip(self.tensors, (key_states, value_states), strict=True):
            tensor[self._rows, :, begin:end] = states if self._source is None else states[self._source.to(states.device)]
        source = self._source
        self.show(self._rows, slice(self._used.start, end))
        return (self.keys, self.values) if source is None else (key_states, value_states)

    def get_seq_length(self) -> int:
        return int(self._used.stop - self._used.start)


def cached_tokens(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [1, heads, 1, D] of each layer that has them, after a pass over one token."""
    layers = getattr(cache, "layers", None) or ()
    pairs = ((getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers)
    return [(key, value) for key, value in pairs if isinstance(key, Tensor) and isinstance(value, Tensor)]


def is_plain(cache: Any) -> bool:
    """Whether it is nothing but `DynamicLayer`s: no sliding windows, no recurrent states."""
    layers = getattr(cache, "layers", None) or ()
    return bool(layers) and all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers)

"""The lean decoder: a step over the weights of a Qwen3, Qwen2 or Llama model, with a cache that is allocated once.

Shape letters as in `decoding`; also H hidden size, Q query heads, K key/value heads, D head size, L layers, N tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from iwopd.lean_model import LeanModel

FIRST_COLUMNS = 128
"""Columns of cache beyond the prompt that are allocated at first; grows by half."""


class LeanDecoder:
    """Rows of a model that has no `lean_obstacle`."""

    joins: bool = True

    def __init__(self, model: nn.Module, vocab_size: int | None = None, *, rows: int, width: int) -> None:
        """Room for `rows` rows of at most `width` tokens, prompt included."""
        self.model = LeanModel(model, vocab_size, width=width, few_rows=True)
        self.rows = rows
        weight = self.model.embedding
        self.device = weight.device
        # Rows that joined late end further right: a quarter more room means that moving them all left is seldom needed.
        self.most_columns = width + width // 4 + 16
        self.keys = weight.new_empty(0)  # [L, rows, K, C, D]
        self.values = self.keys
        self.bias = weight.new_empty(0, 0)  # [rows, C] 0 on real tokens, -inf on padding
        self.clear()

    def clear(self) -> None:
        self.count = self.columns = 0
        self.starts = torch.empty(0, dtype=torch.long)  # [n] first column of each row, on the CPU
        self.positions = torch.empty(0, dtype=torch.long, device=self.device)  # [n] of the next token
        self._note_starts()

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        (prompts, length), newcomers = ids.shape, len(source)
        if self.count + newcomers > self.rows:
            raise ValueError(f"no room for {newcomers} more rows beside {self.count}: the decoder was built for {self.rows}")
        if self.count == 0:
            self.columns = length
        elif length > self.columns:
            raise ValueError(f"a prompt of {length} tokens cannot join rows of {self.columns}; admit long prompts first")
        self._reserve(self.columns)
        rows, columns = slice(self.count, self.count + newcomers), slice(self.columns - length, self.columns)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        seen = mask[:, None, None, :] & torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # Padding looks at itself: a row that sees nothing would be NaN, and NaN times a weight of 0 is still NaN.
        seen = seen | torch.eye(length, dtype=torch.bool, device=ids.device)

        last = torch.arange(1, prompts + 1, device=ids.device) * length - 1
        gqa = self.model.heads != self.model.kv_heads

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (x.unflatten(0, (prompts, length)).transpose(1, 2) for x in (query, key, value))
            self.keys[index, rows, :, columns] = key[source]
            self.values[index, rows, :, columns] = value[source]
            output = F.scaled_dot_product_attention(query, key, value, seen, scale=self.model.scale, enable_gqa=gqa)
            return output.transpose(1, 2).reshape(prompts * length, -1)

        hidden = self.model.states(ids.flatten(), positions.flatten(), attend, last)
        self.count += newcomers
        starts = self.columns - mask.sum(1)
        self.starts = torch.cat((self.starts, starts[source].cpu()))
        self.positions = torch.cat((self.positions, (positions[:, -1] + 1)[source]))
        self._note_starts()
        return self.model.head(hidden)[source]

    def step(self, ids: Tensor) -> Tensor:
        self._reserve(self.columns + 1)
        count, last = self.count, self.columns
        used = slice(self.first, last + 1)
        bias = self.bias[:count, None, None, used] if self.padded else None
        # Views of all layers at once: made in every layer, they would take a tenth of a small model's step.
        keys, values = self.keys[:, :count, :, used].unbind(), self.values[:, :count, :, used].unbind()
        new_key, new_value = self.keys[:, :count, :, last].unbind(), self.values[:, :count, :, last].unbind()

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            new_key[index].copy_(key)
            new_value[index].copy_(value)
            # The query heads that share a key head stand side by side: as if they were queries of that head.
            grouped = query.view(count, self.model.kv_heads, -1, self.model.head_dim)
            output = F.scaled_dot_product_attention(grouped, keys[index], values[index], bias, scale=self.model.scale)
            return output.reshape(count, -1)

        hidden = self.model.states(ids, self.positions, attend)
        self.columns, self.positions = self.columns + 1, self.positions + 1
        return self.model.head(hidden)

    def select(self, order: Tensor) -> None:
        moved = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(1)
        if len(moved):
            origin = order[moved]
            for cache in (self.keys, self.values):
                cache[:, moved] = cache[:, origin]
        self.count = len(order)
        self.starts, self.positions = self.starts[order.cpu()], self.positions[order]
        self._note_starts()

    def _note_starts(self) -> None:
        """Refresh what follows from `starts`: the first column in use, whether there is padding, and the bias that hides it."""
        self.first = int(self.starts.min()) if self.count else 0
        self.padded = bool(self.count) and int(self.starts.max()) > self.first
        if self.padded:
            columns = torch.arange(self.bias.shape[1], device=self.bias.device)
            hidden = columns < self.starts.to(self.bias.device)[:, None]
            self.bias[: self.count] = torch.zeros_like(self.bias[: self.count]).masked_fill_(hidden, float("-inf"))

    def _reserve(self, columns: int) -> None:
        """Make the cache hold `columns` columns: by moving the rows to its left end, or by allocating a larger one."""
        have = self.bias.shape[-1]
        if columns <= have:
            return
        if self.count and (self.first >= have // 4 or have >= self.most_columns):
            self._shift()
            return
        size = max(columns, min(have * 3 // 2 if have else columns + FIRST_COLUMNS, self.most_columns))
        shape = (len(self.model.layers), self.rows, self.model.kv_heads, size, self.model.head_dim)
        # Zeros, because what no row has written is multiplied by 0 and must be finite.
        keys, values = self.model.embedding.new_zeros(shape), self.model.embedding.new_zeros(shape)
        if have:
            keys[:, :, :, :have], values[:, :, :, :have] = self.keys, self.values
        self.keys, self.values = keys, values
        self.bias = self.model.embedding.new_zeros(self.rows, size)
        self._note_starts()

    def _shift(self) -> None:
        for cache in (self.keys, self.values):
            used = cache[:, : self.count, :, self.first : self.columns].clone()
            cache[:, : self.count, :, : self.columns - self.first] = used
        self.columns -= self.first
        self.starts = self.starts - self.first
        self._note_starts()

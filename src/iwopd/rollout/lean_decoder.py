"""The lean decoder: a step over the weights of a Qwen3, Qwen2 or Llama model, with a cache that is allocated once.

Shape letters as in `decoding`; also H hidden size, Q query heads, K key/value heads, D head size, L layers, N tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from iwopd.devices import upload
from iwopd.lean_model import LeanModel
from iwopd.rollout.head import head_logits
from iwopd.rollout.store import Store

TENSOR_BYTES = 2**28
"""Layers share a tensor of the cache up to this size: views of all of them are then made at once. Larger caches have a tensor
for each layer, which an accelerator's allocator places more easily than one that is half of its memory."""


class LeanDecoder:
    """Rows of a model that has no `lean_obstacle`."""

    joins: bool = True

    def __init__(
        self, model: nn.Module, vocab_size: int | None = None, *, width: int, dtype: torch.dtype | None = None
    ) -> None:
        """`width`: most tokens of a row, prompt included. `dtype`: multiply and cache in this half precision, like autocast."""
        self.model = LeanModel(model, vocab_size, width=width, few_rows=True, dtype=dtype)
        self.device = self.model.embedding.device
        self.reserve(0, 0)

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        layer = 2 * self.model.kv_heads * self.model.head_dim * self.model.dtype.itemsize
        # One layer more for what attention may make of a layer's keys and values; the bias, and the mask it is made from.
        return {self.device: layer * (len(self.model.layers) + 1) + self.model.dtype.itemsize + 1}

    def reserve(self, rows: int, columns: int) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.model.dtype, device=self.device)

        layers, heads, size = len(self.model.layers), self.model.kv_heads, self.model.head_dim
        together = max(1, TENSOR_BYTES // max(1, rows * heads * columns * size * self.model.dtype.itemsize))
        counts = [min(together, layers - start) for start in range(0, layers, together)]
        self.keys = [empty(count, rows, heads, columns, size) for count in counts]
        self.values = [empty(count, rows, heads, columns, size) for count in counts]
        self.bias = empty(rows, columns)  # 0 on real tokens, -inf on padding
        self.store = Store([*self.keys, *self.values])
        self._note_starts()

    def clear(self) -> None:
        self.store.clear()
        self._note_starts()

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        prompts, length = ids.shape
        rows, columns = self.store.join(length, mask.sum(1)[source].tolist())
        ids, mask, source = (upload(x, self.device) for x in (ids, mask, source))
        keys, values = (self._layers(tensors, rows, columns) for tensors in (self.keys, self.values))
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        last = torch.arange(1, prompts + 1, device=ids.device) * length - 1
        seen = None  # a single prompt has no padding
        if prompts > 1:
            seen = mask[:, None, None, :] & torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
            # Padding looks at itself: a row that sees nothing would be NaN, and NaN times a weight of 0 is still NaN.
            seen.diagonal(dim1=-2, dim2=-1).fill_(True)
        groups = self.model.heads // self.model.kv_heads
        on_cpu = ids.device.type == "cpu"

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (x.unflatten(0, (prompts, length)).transpose(1, 2) for x in (query, key, value))
            keys[index].copy_(key[source])
            values[index].copy_(value[source])
            if not on_cpu:  # no fused kernel of an accelerator takes grouped heads together with a mask
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            output = F.scaled_dot_product_attention(
                query, key, value, seen, is_causal=seen is None, scale=self.model.scale, enable_gqa=on_cpu and groups > 1
            )
            return output.transpose(1, 2).reshape(prompts * length, -1)

        hidden = self.model.states(ids.flatten(), positions.flatten(), attend, last)
        self._note_starts()
        return self._logits(hidden)[source]

    def step(self, ids: Tensor) -> Tensor:
        left = self.store.first
        last = self.store.advance()
        if self.store.first != left:
            self._note_starts()
        count, used = len(self.store), self.store.used
        rows = slice(0, count)
        bias = self.bias[:count, None, None, used] if self.padded else None
        # Views of all layers at once: made in every layer, they would take a tenth of a small model's step.
        keys, values = self._layers(self.keys, rows, used), self._layers(self.values, rows, used)
        new_keys, new_values = self._layers(self.keys, rows, last), self._layers(self.values, rows, last)

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            new_keys[index].copy_(key)
            new_values[index].copy_(value)
            # The query heads that share a key head stand side by side: as if they were queries of that head.
            grouped = query.view(count, self.model.kv_heads, -1, self.model.head_dim)
            output = F.scaled_dot_product_attention(grouped, keys[index], values[index], bias, scale=self.model.scale)
            return output.reshape(count, -1)

        return self._logits(self.model.states(ids, last - self.starts, attend))

    def select(self, order: Tensor) -> None:
        self.store.select(order.tolist())
        self._note_starts()

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, V] of last hidden states [N, H]."""
        matrix, bias = self.model.head.matrices[0], self.model.head.biases[0]
        return self.model.head(hidden) if matrix.itemsize > 2 else head_logits(hidden, matrix.t(), bias)

    @staticmethod
    def _layers(tensors: list[Tensor], rows: slice, columns: slice | int) -> list[Tensor]:
        """A view of each layer."""
        return [layer for tensor in tensors for layer in tensor[:, rows, :, columns].unbind()]

    def _note_starts(self) -> None:
        """Refresh what follows from where rows start."""
        self.starts = upload(torch.tensor(self.store.starts, dtype=torch.long), self.device)  # [n]
        self.padded = self.store.padded
        if self.padded:
            hidden = torch.arange(self.bias.shape[1], device=self.device) < self.starts[:, None]
            self.bias[: len(hidden)].zero_().masked_fill_(hidden, float("-inf"))

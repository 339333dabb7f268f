"""Decoders: what the sampling loop asks of a model, and those that work with any model's own forward.

A decoder holds the key/value cache of the rows that are being written (`store`). Rows are right-aligned: each step writes the
same column of the cache in every row, and a row whose prompt is shorter has padding on its left. So rows of any age share one
batch, and newcomers can join a batch that is under way.

Shape letters: n rows under way, b prompts that are read, r newcomers, P columns of prompt, W columns of cache, V ids.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from iwopd.devices import upload
from iwopd.model_facts import text_config
from iwopd.rollout.store import Store


class Decoder(Protocol):
    """Rows under way, numbered from 0 in the order in which they came."""

    joins: bool
    """Whether newcomers can join rows under way; if not, `admit` needs an empty batch."""

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        """Bytes that a token under way takes on each device, with all that a step makes in proportion to the cache."""

    def reserve(self, rows: int, columns: int) -> None:
        """Allocate the cache, before anything else. It never grows."""

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        """Read prompts and append rows: newcomer j continues prompt `source[j]`. Returns its logits [r, V].

        `ids` and `mask` are [b, P], left-padded; `source` is [r]; all on the CPU. P must not exceed the longest row under way.
        """

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row, `ids` [n]. Returns the logits [n, V] of the next."""

    def select(self, order: Tensor) -> None:
        """Keep these rows; `order` [m], on the CPU, may not be empty. Rows below m keep their number, others fill gaps."""

    def clear(self) -> None:
        """Forget all rows."""


def model_decoder(model: nn.Module, vocab_size: int | None = None) -> ModelDecoder | WaveDecoder:
    """A decoder over the model's own forward. A pass over one token shows what its cache is like."""
    from iwopd.rollout.cache import cached_tokens, is_plain

    forward = _Forward(model, vocab_size)
    one = torch.zeros(1, 1, dtype=torch.long, device=forward.device)
    cache = forward(one, one + 1, one, None)[1]
    if cache is None:
        raise ValueError(f"{type(model).__name__} returned no key/value cache, which the sampler needs")
    return ModelDecoder(forward, cache) if is_plain(cache) else WaveDecoder(forward, cached_tokens(cache))


class _Forward:
    """A model's own forward: arguments that it takes, logits that we want."""

    def __init__(self, model: Any, vocab_size: int | None) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.device: torch.device = model.get_input_embeddings().weight.device
        accepted = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        self._takes_positions = open_ended or "position_ids" in accepted
        self._last_logits = {"logits_to_keep": 1} if open_ended or "logits_to_keep" in accepted else {}
        config = text_config(model.config)
        kv_heads = getattr(config, "num_key_value_heads", None)
        self.groups: int = max(1, config.num_attention_heads // kv_heads) if kv_heads else 1
        """Query heads that share a key head."""

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits [n, V] after the last of tokens [n, P], and the cache."""
        where = {"position_ids": positions} if self._takes_positions else {}
        output = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **where, **self._last_logits
        )
        return output.logits[:, -1, : self.vocab_size], output.past_key_values

    def token_bytes(self, sizes: list[tuple[torch.device, int]]) -> dict[torch.device, int]:
        """Of a cache with layers of these sizes for a token, each on its device."""
        total: Counter[torch.device] = Counter()
        working: Counter[torch.device] = Counter()
        for device, size in sizes:
            total[device] += size
            # Most attention functions repeat keys and values for the query heads that share them, one layer at a time.
            working[device] = max(working[device], (1 + self.groups) * size)
        # The mask: 8 bytes of ours, and what the model makes of it.
        return {device: total[device] + working[device] + 16 for device in total}


class ModelDecoder:
    """A transformers causal LM through its own forward, with a plain key/value cache."""

    joins: bool = True

    def __init__(self, forward: _Forward, cache: Any) -> None:
        """`cache` is what a pass over one token returned."""
        self._forward, self._cache = forward, cache
        self._like = [(layer.keys, layer.values) for layer in cache.layers]
        self.reserve(0, 0)

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        layers = self._cache.layers
        sizes = [(layer.device, sum(t.shape[1] * t.shape[3] * t.itemsize for t in layer.tensors)) for layer in layers]
        return self._forward.token_bytes(sizes)

    def reserve(self, rows: int, columns: int) -> None:
        from iwopd.rollout.cache import RoomyLayer

        self._cache.layers = [RoomyLayer(key, value, rows, columns) for key, value in self._like]
        self._store = Store([tensor for layer in self._cache.layers for tensor in layer.tensors])
        self._mask = torch.zeros(rows, columns, dtype=torch.long, device=self._forward.device)  # 1 on real tokens
        self._note_starts()

    def clear(self) -> None:
        self._store.clear()
        self._note_starts()

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        rows, columns = self._store.join(ids.shape[1], mask.sum(1)[source].tolist())
        ids, mask, source = (upload(x, self._forward.device) for x in (ids, mask.long(), source))
        for layer in self._cache.layers:
            layer.read(rows, columns, source)
        logits, self._cache = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), self._cache)
        self._note_starts()
        return logits[source]

    def step(self, ids: Tensor) -> Tensor:
        left = self._store.first
        last = self._store.advance()
        if self._store.first != left:
            self._note_starts()
        rows, seen = slice(0, len(self._store)), self._store.used
        for layer in self._cache.layers:
            layer.show(rows, slice(seen.start, last))
        positions = (last - self._starts)[:, None]
        logits, self._cache = self._forward(ids[:, None], self._mask[rows, seen], positions, self._cache)
        return logits

    def select(self, order: Tensor) -> None:
        self._store.select(order.tolist())
        self._note_starts()

    def _note_starts(self) -> None:
        """Refresh what follows from where rows start."""
        self._starts = upload(torch.tensor(self._store.starts, dtype=torch.long), self._mask.device)  # [n]
        columns = torch.arange(self._mask.shape[1], device=self._mask.device)
        self._mask[: len(self._starts)] = columns >= self._starts[:, None]


class WaveDecoder:
    """A transformers causal LM whose cache is its own affair (sliding windows, recurrent states): rows start together."""

    joins: bool = False

    def __init__(self, forward: _Forward, tokens: list[tuple[Tensor, Tensor]]) -> None:
        """`tokens`: keys and values of one token, of each layer that has them."""
        self._forward, self._tokens = forward, tokens
        self.clear()

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        """As if windows had no end. The cache grows by copying, one layer at a time."""
        return self._forward.token_bytes([(key.device, key.nbytes + value.nbytes) for key, value in self._tokens])

    def reserve(self, rows: int, columns: int) -> None:
        """Nothing can be allocated ahead."""

    def clear(self) -> None:
        self._cache: Any = None
        self._mask = torch.empty(0, 0)  # [n, W] int64, 1 on real tokens
        self._positions = torch.empty(0)  # [n] position of the next token

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        if self._cache is not None:
            raise ValueError(f"rows cannot join a {type(self._cache).__name__} under way")
        ids, mask, source = (upload(x, self._forward.device) for x in (ids, mask.long(), source))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits, self._cache = self._forward(ids, mask, positions, None)
        self._cache.reorder_cache(source)
        self._mask, self._positions = mask[source], positions[source, -1] + 1
        return logits[source]

    def step(self, ids: Tensor) -> Tensor:
        self._mask = nn.functional.pad(self._mask, (0, 1), value=1)
        logits, self._cache = self._forward(ids[:, None], self._mask, self._positions[:, None], self._cache)
        self._positions = self._positions + 1
        return logits

    def select(self, order: Tensor) -> None:
        order = upload(order, self._mask.device)
        self._mask, self._positions = self._mask[order], self._positions[order]
        self._cache.reorder_cache(order)

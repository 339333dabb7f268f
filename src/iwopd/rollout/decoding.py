"""Decoders: what the sampling loop asks of a model, and the one that works with any model's own forward.

A decoder holds the key/value cache of the rows that are being written. Rows are right-aligned: each step writes the same
column of the cache in every row, and a row whose prompt is shorter has padding on its left. So rows of any age share one
batch, and newcomers can join a batch that is under way.

Shape letters: n rows under way, b prompts that are read, r newcomers, P columns of prompt, W columns of cache, V ids.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Decoder(Protocol):
    """Rows under way, numbered from 0 in the order in which they came."""

    joins: bool
    """Whether newcomers can join rows under way; if not, `admit` needs an empty batch."""

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        """Read prompts and append rows: newcomer j continues prompt `source[j]`. Returns its logits [r, V].

        `ids` and `mask` are [b, P], left-padded; `source` is [r]. P must not exceed the longest row under way.
        """

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row, `ids` [n]. Returns the logits [n, V] of the next."""

    def select(self, order: Tensor) -> None:
        """Keep these rows, in this order; `order` [m] may not be empty. Rows that keep their number cost nothing."""

    def clear(self) -> None:
        """Forget all rows."""


class ModelDecoder:
    """Any transformers causal LM, through its own forward and its own cache."""

    def __init__(self, model: nn.Module, vocab_size: int | None = None) -> None:
        self.model, self.vocab_size = model, vocab_size
        accepted = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        self._takes_positions = open_ended or "position_ids" in accepted
        self._last_logits = {"logits_to_keep": 1} if open_ended or "logits_to_keep" in accepted else {}
        self.clear()

    def clear(self) -> None:
        self.joins = True
        self._cache: Any = None
        self._mask = torch.empty(0, 0)  # [n, W] int64, 1 on real tokens
        self._positions = torch.empty(0)  # [n] position of the next token

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        from iwopd.rollout.cache import make_roomy

        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        output = self._forward(ids, mask.long(), positions, None)
        cache = output.past_key_values
        if cache is None:
            raise ValueError(f"{type(self.model).__name__} returned no key/value cache, which the sampler needs")
        cache.reorder_cache(source)
        logits, mask, positions = self._logits(output)[source], mask.long()[source], positions[source, -1] + 1
        roomy = make_roomy(cache)
        if self._cache is None:
            self.joins, self._cache, self._mask, self._positions = roomy, cache, mask, positions
            return logits
        if not (self.joins and roomy):
            raise ValueError(f"rows cannot join a {type(cache).__name__} under way")
        for layer, newcomers in zip(self._cache.layers, cache.layers, strict=True):
            layer.join(newcomers)
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([nn.functional.pad(m, (width - m.shape[1], 0)) for m in (self._mask, mask)])
        self._positions = torch.cat((self._positions, positions))
        self._trim()
        return logits

    def step(self, ids: Tensor) -> Tensor:
        self._mask = nn.functional.pad(self._mask, (0, 1), value=1)
        output = self._forward(ids[:, None], self._mask, self._positions[:, None], self._cache)
        self._cache = output.past_key_values
        self._positions = self._positions + 1
        return self._logits(output)

    def select(self, order: Tensor) -> None:
        self._mask, self._positions = self._mask[order], self._positions[order]
        if not self.joins:
            self._cache.reorder_cache(order)
            return
        moved = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(1)
        for layer in self._cache.layers:
            layer.select(moved, order[moved], len(order))
        self._trim()

    def _trim(self) -> None:
        """Cut the columns on the left that no row uses any more."""
        unused = int(self._mask.argmax(1).min())
        if unused:
            self._mask = self._mask[:, unused:]
            for layer in self._cache.layers:
                layer.trim(unused)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        where = {"position_ids": positions} if self._takes_positions else {}
        return self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **where, **self._last_logits
        )

    def _logits(self, output: Any) -> Tensor:
        logits: Tensor = output.logits[:, -1]
        return logits if self.vocab_size is None else logits[:, : self.vocab_size]

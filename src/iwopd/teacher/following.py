"""A local model that scores answers while they are written, block by block, with a key/value cache of its own.

The last token of a piece waits for the next piece: its state predicts the first token there. So every token is read once, and
of an answer that ends the last one is never read. Log-probs are those of `LocalScorer.look` over the whole answer, up to
rounding.

Plain Qwen3, Qwen2 and Llama models read the pieces of many answers in one pass (`_LeanReader`). Others go through their own
forward pass, one answer at a time (`_ModelReader`).

Shape letters: N tokens that are read, n answers, L layers, Q query heads, K key/value heads, D head size, W columns of cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted, scores_of_logits
from iwopd.devices import cache_bytes, upload
from iwopd.lean_model import LeanModel, has_adapters, lean_obstacle
from iwopd.lm import ResponseModel
from iwopd.model_facts import text_config
from iwopd.modes import eval_mode
from iwopd.own_head import at_temperature, last_logits
from iwopd.packing import packed_attention
from iwopd.teacher.scorer import Follower
from iwopd.types import Piece

CACHE_SHARE = 0.25
"""Of an accelerator's free memory: the student's cache, which is allocated after this is asked, takes half of it."""
FIRST_COLUMNS = 64
"""Columns of an answer's cache at first; they double."""


Part = tuple[int, Tensor, Tensor]
"""An answer, tokens to read [m] and tokens to score [k]: the last k tokens that are read predict those that are scored."""


class Reader(Protocol):
    """Reads tokens and remembers what it needs of them for those that follow."""

    def scores(self, parts: Sequence[Part], wanted: Wanted) -> list[TokenScores]:
        """Of the tokens to score of each part."""

    def forget(self, row: int) -> None:
        """The answer is not followed any more."""

    @property
    def token_bytes(self) -> int:
        """Of the cache."""


class LocalFollower(Follower):
    """Follows the answers of one step."""

    def __init__(self, lm: ResponseModel, token_budget: int, wanted: Wanted = NOTHING) -> None:
        self._lm, self._budget, self._wanted = lm, token_budget, wanted
        with lm.autocast():
            plain = not torch.is_autocast_enabled(lm.device.type)
        is_lean = plain and lm.fused and lean_obstacle(lm.model) is None and not has_adapters(lm.model)
        self._reader: Reader = _LeanReader(lm) if is_lean else _ModelReader(lm)
        self._waiting: dict[int, Tensor] = {}
        """By answer: the token that was scored last and is not read yet."""

    @property
    def token_bytes(self) -> int:
        """Of the cache."""
        return self._reader.token_bytes

    @property
    def room(self) -> int:
        """Half of the cache's tokens may be empty: its columns double."""
        return max(1, cache_bytes(self._lm.device, CACHE_SHARE) // (2 * self.token_bytes))

    @torch.no_grad()
    def read(self, pieces: Sequence[Piece], wanted: Wanted | None = None) -> list[TokenScores]:
        """`wanted`: another one than the follower's, for once."""
        wanted = self._wanted if wanted is None else wanted
        parts: list[Part] = []
        for piece in pieces:
            before = self._waiting.get(piece.row)
            before = torch.tensor(piece.prompt.token_ids) if before is None else before
            parts.append((piece.row, torch.cat([before, piece.ids[:-1]]), piece.ids))
            self._waiting[piece.row] = piece.ids[-1:]
        found: list[TokenScores] = []
        with eval_mode(self._lm.model):
            for batch in _batches(parts, self._budget):
                found += [one.cpu() for one in self._reader.scores(batch, wanted)]
        return found

    def leave(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._waiting.pop(row, None)
            self._reader.forget(row)


def _batches(parts: Sequence[Part], budget: int) -> list[list[Part]]:
    """In order, of at most `budget` tokens (or one part)."""
    batches: list[list[Part]] = []
    size = 0
    for part in parts:
        if not batches or size + len(part[1]) > budget:
            batches.append([])
            size = 0
        batches[-1].append(part)
        size += len(part[1])
    return batches


@dataclass
class _Row:
    """The cache of one answer: [L, K, columns, D], of which `length` columns are used."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def reserve(self, length: int) -> None:
        columns = self.keys.shape[2]
        if length > columns:
            while columns < length:
                columns *= 2
            self.keys, self.values = (F.pad(x, (0, 0, 0, columns - x.shape[2])) for x in (self.keys, self.values))


class _LeanReader:
    """Many answers in one pass over the weights."""

    def __init__(self, lm: ResponseModel) -> None:
        self._lm = lm
        self._model = LeanModel(lm.model, width=1, few_rows=False)
        self._width = 1
        self._rows: dict[int, _Row] = {}

    @property
    def token_bytes(self) -> int:
        model = self._model
        return 2 * len(model.layers) * model.kv_heads * model.head_dim * model.dtype.itemsize

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def scores(self, parts: Sequence[Part], wanted: Wanted) -> list[TokenScores]:
        # Newcomers first, then those whose caches have the same number of columns side by side: each is one product.
        rows = [self._row(row, len(ids)) for row, ids, _ in parts]
        order = sorted(range(len(parts)), key=lambda place: (rows[place].length > 0, rows[place].keys.shape[2]))
        chosen = [(rows[place], parts[place][1], parts[place][2]) for place in order]
        hidden, targets = self._read(chosen), [scored for _, _, scored in chosen]
        ids = upload(torch.cat(targets), hidden.device)
        found = self._lm.head_scores(hidden, ids, wanted)
        by_place = dict(zip(order, found.split([len(scored) for scored in targets]), strict=True))
        return [by_place[place] for place in range(len(parts))]

    def _row(self, row: int, more: int) -> _Row:
        """The cache of an answer, with room for `more` tokens."""
        if row not in self._rows:
            model = self._model
            shape = (len(model.layers), model.kv_heads, FIRST_COLUMNS, model.head_dim)
            empty = torch.zeros(shape, dtype=model.dtype, device=model.embedding.device)
            self._rows[row] = _Row(empty, empty.clone())
        found = self._rows[row]
        found.reserve(found.length + more)
        return found

    def _read(self, parts: Sequence[tuple[_Row, Tensor, Tensor]]) -> Tensor:
        """States [N, H] that predict the scored tokens; the caches are longer afterwards."""
        counts = [len(ids) for _, ids, _ in parts]
        self._widen(max(row.length + count for (row, _, _), count in zip(parts, counts, strict=True)))
        device = self._model.embedding.device
        positions = torch.cat([torch.arange(row.length, row.length + len(ids)) for row, ids, _ in parts])
        ends = torch.tensor(counts).cumsum(0).tolist()
        keep = torch.cat([torch.arange(end - len(scored), end) for end, (_, _, scored) in zip(ends, parts, strict=True)])
        attention = _Attention([row for row, _, _ in parts], counts, self._model.scale, device)
        hidden = self._model.states(
            upload(torch.cat([ids for _, ids, _ in parts]), device), upload(positions, device), attention, upload(keep, device)
        )
        attention.store()
        return hidden

    def _widen(self, width: int) -> None:
        """Rotary embeddings for so many positions; the weights themselves are views."""
        if width > self._width:
            self._width = max(width, 2 * self._width)
            self._model = LeanModel(self._lm.model, width=self._width, few_rows=False)


class _Attention:
    """Attention of new tokens [N], answer after answer, to themselves and to what their caches hold."""

    def __init__(self, rows: Sequence[_Row], counts: Sequence[int], scale: float, device: torch.device) -> None:
        self._rows, self._counts, self._scale = rows, counts, scale
        self._new: list[tuple[Tensor, Tensor]] = []
        """Of each layer: keys and values [N, K, D]."""
        self._fresh = sum(row.length == 0 for row in rows)
        """Answers at the beginning that have no cache yet."""
        old = list(zip(rows, counts, strict=True))[self._fresh :]
        self._groups = [_Group(list(group), device) for _, group in groupby(old, key=lambda item: item[0].keys.shape[2])]
        self._read_first = sum(counts[: self._fresh])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._new.append((key, value))
        outputs, start = [], self._read_first
        if self._fresh:
            lengths = self._counts[: self._fresh]
            outputs.append(packed_attention(query[:start], key[:start], value[:start], lengths, self._scale))
        for group in self._groups:
            own = slice(start, start + group.tokens)
            outputs.append(group.attend(layer, query[own], key[own], value[own], self._scale))
            start += group.tokens
        return torch.cat(outputs).flatten(1)

    def store(self) -> None:
        """Put the new keys and values into the caches."""
        keys, values = (torch.stack(tensors) for tensors in zip(*self._new, strict=True))  # [L, N, K, D]
        start = 0
        for row, count in zip(self._rows, self._counts, strict=True):
            columns, own = slice(row.length, row.length + count), slice(start, start + count)
            row.keys[:, :, columns] = keys[:, own].transpose(1, 2)
            row.values[:, :, columns] = values[:, own].transpose(1, 2)
            row.length += count
            start += count


class _Group:
    """Answers whose caches have the same number of columns."""

    def __init__(self, items: Sequence[tuple[_Row, int]], device: torch.device) -> None:
        self.rows = [row for row, _ in items]
        counts = torch.tensor([count for _, count in items])
        lengths = torch.tensor([row.length for row in self.rows])
        self.tokens, self.most = int(counts.sum()), int(counts.max())
        self.columns = int(lengths.max())
        new = torch.arange(self.most)
        real = new < counts[:, None]  # [n, most]
        self.places = None if bool(real.all()) else upload(real, device)
        cached = (torch.arange(self.columns) < lengths[:, None])[:, None].expand(-1, self.most, -1)
        # Padding is at the end, where no real token sees it; it sees what it likes.
        causal = (new[:, None] >= new).expand(len(items), -1, -1)
        self.seen = upload(torch.cat([cached, causal], -1)[:, None], device)  # [n, 1, most, columns + most]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, Q, D] of queries [N, Q, D] to keys and values [N, K, D] and the caches."""
        query, key, value = (self._padded(x).transpose(1, 2) for x in (query, key, value))
        keys = torch.cat([torch.stack([row.keys[layer, :, : self.columns] for row in self.rows]), key], 2)
        values = torch.cat([torch.stack([row.values[layer, :, : self.columns] for row in self.rows]), value], 2)
        groups = query.shape[1] // keys.shape[1]
        if query.device.type != "cpu" and groups > 1:  # no fused kernel of an accelerator takes both grouped heads and a mask
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        gqa = query.shape[1] != keys.shape[1]
        mixed: Tensor = F.scaled_dot_product_attention(query, keys, values, self.seen, scale=scale, enable_gqa=gqa)
        output = mixed.transpose(1, 2)
        return output.flatten(0, 1) if self.places is None else output[self.places]

    def _padded(self, x: Tensor) -> Tensor:
        """[n, most, heads, D] of [N, heads, D]."""
        if self.places is None:
            return x.view(len(self.rows), self.most, *x.shape[1:])
        padded = x.new_zeros(len(self.rows), self.most, *x.shape[1:])
        padded[self.places] = x
        return padded


class _ModelReader:
    """The model's own forward pass with its own kind of cache, one answer at a time."""

    def __init__(self, lm: ResponseModel) -> None:
        self._lm = lm
        self._caches: dict[int, Any] = {}

    @property
    def token_bytes(self) -> int:
        """As if windows had no end."""
        config = text_config(self._lm.model.config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        itemsize = int(next(self._lm.model.parameters()).itemsize)
        return 2 * int(config.num_hidden_layers) * int(heads) * int(size) * itemsize

    def forget(self, row: int) -> None:
        self._caches.pop(row, None)

    def scores(self, parts: Sequence[Part], wanted: Wanted) -> list[TokenScores]:
        device = self._lm.device
        return [self._score(row, upload(ids, device), upload(scored, device), wanted) for row, ids, scored in parts]

    def _score(self, row: int, ids: Tensor, scored: Tensor, wanted: Wanted) -> TokenScores:
        from transformers import DynamicCache

        model = self._lm.model
        if row not in self._caches:
            self._caches[row] = DynamicCache(config=model.config)
        inputs = {"input_ids": ids[None], "past_key_values": self._caches[row], "use_cache": True}
        if self._lm.fused:
            with self._lm.autocast():
                states = model.base_model(**inputs).last_hidden_state[0, -len(scored) :]
            return self._lm.head_scores(states, scored, wanted)
        with self._lm.autocast():
            logits = last_logits(model, inputs, len(scored))[:, : self._lm.vocab_size]
        return scores_of_logits(at_temperature(logits, self._lm.temperature).clone(), scored.to(logits.device), wanted)

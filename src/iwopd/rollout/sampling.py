"""From logits to token ids: temperature, top-k, top-p and the inverse of the cumulative distribution.

Shape letters: N rows, V ids of the real vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.errors import UserError

CHUNK_ELEMENTS = 2**24
"""Elements of the [N, V] buffers that are worked through at a time: 64 MB of probabilities, 128 MB of their float64 sums."""
TOP_P_CANDIDATES = 1024
"""How many of the likeliest ids top-p looks at before it sorts the whole vocabulary; nearly always enough."""


class SamplingError(UserError, ValueError):
    """Prompts that a model cannot answer under these settings."""


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn, and when an answer ends."""

    max_tokens: int
    """Longest answer, end-of-sequence token included."""
    temperature: float = 1.0
    """0 takes the likeliest id (greedy)."""
    top_p: float = 1.0
    """Draw from the likeliest ids that together hold this much of the probability; 1 draws from all."""
    top_k: int = 0
    """Draw from this many likeliest ids; 0 draws from all. Applied before top-p. Ids that tie with the last one stay."""
    stop_ids: Collection[int] = frozenset()
    """Ids that end an answer, and belong to it. Ids that the model does not have are ignored. Kept as a frozenset."""

    def __post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer >= 1, got {self.max_tokens!r}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be >= 0 (0 is greedy) and finite, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1 switches it off), got {self.top_p!r}")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0 switches it off), got {self.top_k!r}")
        if not isinstance(self.stop_ids, Collection) or isinstance(self.stop_ids, (str, bytes)):
            raise TypeError(f"stop_ids must be a set of ids, got {self.stop_ids!r}; write (2,) for one id")
        for stop in self.stop_ids:
            if not _is_int(stop) or stop < 0:
                raise ValueError(f"stop_ids must be integers >= 0, got {stop!r}")
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Choice(NamedTuple):
    """One drawn token a row."""

    ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] float32, as the trainer's: over the whole real vocabulary, whatever top-k and top-p left out, at the sampling
    temperature (greedy: 1)."""


@torch.no_grad()
def choose(logits: Tensor, uniforms: Tensor | None, settings: SamplingSettings) -> Choice:
    """Draw an id for each row of `logits` [N, V] with the numbers `uniforms` [N] in [0, 1); greedy needs none.

    The id is the first one whose cumulative probability exceeds the number: a function of this row alone, where a draw from
    a shared generator would depend on the rows before it. Sums run in float64. An id of probability 0 is never drawn.
    """
    if uniforms is None and not settings.greedy:
        raise ValueError("choose() needs uniform numbers unless temperature is 0")
    if logits.device.type == "mps":  # no float64 there
        chosen = choose(logits.cpu(), None if uniforms is None else uniforms.cpu(), settings)
        return Choice(chosen.ids.to(logits.device), chosen.logprobs.to(logits.device))
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    if len(logits) <= rows:
        return _choose(logits, uniforms, settings)
    noise = uniforms.split(rows) if uniforms is not None else [None] * math.ceil(len(logits) / rows)
    pieces = [_choose(*piece, settings) for piece in zip(logits.split(rows), noise, strict=True)]
    return Choice(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _choose(logits: Tensor, uniforms: Tensor | None, settings: SamplingSettings) -> Choice:
    logits = logits.float()
    if settings.greedy or uniforms is None:
        ids = logits.argmax(-1, keepdim=True)
        return Choice(ids.squeeze(-1), logits.log_softmax(-1).gather(-1, ids).squeeze(-1))
    if settings.temperature != 1:
        logits = logits / settings.temperature
    probs = logits.softmax(-1)
    kept = restrict(probs, settings.top_k, settings.top_p)
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # u < 1, but u * total can round up to total, which no cumulative sum exceeds.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The clamp matters for a row of NaN only: its log-prob is then NaN too, for the caller to see.
    ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    return Choice(ids.squeeze(-1), probs.gather(-1, ids).log().squeeze(-1))


def restrict(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """`probs` [N, V] with 0 outside the top-k and top-p sets; not renormalised.

    Top-k keeps the ids at least as likely as the k-th; top-p keeps the ids at least as likely as the last one that is
    needed to reach `top_p` of what top-k left. Ties stay, so the set does not depend on a sorting order.
    """
    size = probs.shape[1]
    if 0 < top_k < size:
        likeliest = probs.topk(top_k, -1).values
        probs = probs.where(probs >= likeliest[:, -1:], 0.0)
        if top_p < 1:
            probs = probs.where(probs >= _top_p_border(probs, likeliest, top_p, complete=True), 0.0)
    elif top_p < 1:
        count = min(size, TOP_P_CANDIDATES)
        probs = probs.where(probs >= _top_p_border(probs, probs.topk(count, -1).values, top_p, complete=count == size), 0.0)
    return probs


def _top_p_border(probs: Tensor, likeliest: Tensor, top_p: float, *, complete: bool) -> Tensor:
    """Smallest probability [N, 1] of the top-p set. `likeliest` [N, C] fall; `complete`: the rest are 0 or tie."""
    target = probs.sum(-1, keepdim=True, dtype=torch.float64) * top_p
    reached = likeliest.cumsum(-1, dtype=torch.float64)
    needed = (reached < target).sum(-1, keepdim=True)
    border = likeliest.gather(-1, needed.clamp(max=likeliest.shape[1] - 1))
    if not complete:
        flat = (needed == likeliest.shape[1]).squeeze(-1)
        if bool(flat.any()):
            spread = probs[flat]
            border[flat] = _top_p_border(spread, spread.sort(-1, descending=True).values, top_p, complete=True)
    return border


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

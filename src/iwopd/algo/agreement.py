"""Agreement of gradients: do the tokens after a drift pull the student where the tokens before it do?

The gradient of a batch is a sum over its tokens. Survival weights s[t] (`weights.survival`) split it in two:

    before = sum_t s[t] g[t],    after = sum_t (1 - s[t]) g[t],    agreement = cos(before, after)

with g[t] the gradient of token t's loss, its weight divided out. A teacher that leads back after a drift pulls the same way in
both parts; under one that follows the drift, the second part points elsewhere or back. No answers are needed.

g[t] is taken by a linear map behind the last hidden state h[t]: `dL/dh[t] h[t]^T`. Every backward pass has dL/dh, so this costs
two products [H, N] x [N, H] a step where a second backward pass would cost as much as the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from iwopd.algo._checks import keep, wide
from iwopd.algo.weights import token_weights

DECAY = 0.9
"""Of the running mean: the last ten steps or so count."""
WIDEST = 512
"""Wider hidden states are projected to so many numbers: a cosine to within about 0.04, and a megabyte per part."""
ROWS = 1024
"""Tokens that are added up at a time."""
SMALLEST = 1e-30
"""Weights below this cannot be divided out of a float32 gradient."""


@dataclass(frozen=True)
class GradientParts:
    """The two parts of a gradient: `before` and `after`. Those of disjoint tokens can be added up."""

    sums: Tensor
    """[2, K, K]."""

    @classmethod
    @torch.no_grad()
    def of(cls, hidden: Tensor, gradient: Tensor, before: Tensor, after: Tensor) -> GradientParts:
        """Of N tokens: hidden states [N, H], the loss's gradient by them [N, H], and the coefficients [N] of `split`."""
        width = min(hidden.shape[1], WIDEST)
        sums = torch.zeros(2, width, width, device=hidden.device)
        for start in range(0, len(hidden), ROWS):  # a few at a time: copies of all states would be large
            rows = slice(start, start + ROWS)
            states, slopes = _narrow(hidden[rows].float()), _narrow(gradient[rows].float())
            for place, part in enumerate((before, after)):
                sums[place].addmm_((slopes * part[rows].to(slopes.dtype)[:, None]).t(), states)
        return cls(sums)

    @classmethod
    def merge(cls, parts: Sequence[GradientParts]) -> GradientParts:
        """Those of several sets of tokens taken together."""
        total = parts[0].sums.clone()
        for part in parts[1:]:
            total += part.sums
        return cls(total)

    def cpu(self) -> GradientParts:
        """The same, on the CPU."""
        return GradientParts(self.sums.cpu())

    @property
    def agreement(self) -> float | None:
        """The cosine, in [-1, 1]; None where a part is empty or no number."""
        flat = wide(self.sums.flatten(1))
        (before, both), (_, after) = (flat @ flat.t()).tolist()  # read once: the host waits for every number
        size = math.sqrt(max(0.0, before)) * math.sqrt(max(0.0, after))
        if not (size > 0 and math.isfinite(size) and math.isfinite(both)):
            return None
        return min(1.0, max(-1.0, float(both / size)))


def working_bytes(tokens: int, hidden: int) -> float:
    """Memory that the parts of micro-batches of so many tokens take: sums so far, those of one, and copies of a few rows."""
    width, rows = min(hidden, WIDEST), min(tokens, ROWS)
    return 4.0 * (4 * width**2 + rows * (2 * hidden + 3 * width))


@torch.no_grad()
def split(gap: Tensor, mask: Tensor, weights: Tensor, supervised: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """Coefficients [B, T] of the two parts, `s / w` and `(1 - s) / w`; 0 where a token has no gradient that can be used."""
    survived = token_weights("survival", gap, mask, tau=tau)
    usable = mask & supervised & (weights.abs() > SMALLEST)
    over = keep(1.0 / torch.where(usable, weights, 1.0), usable)
    return survived * over, (1.0 - survived) * over


@dataclass(frozen=True)
class RunningMean:
    """A mean in which a value counts `DECAY` times as much as the one after it, and that begins with one 0."""

    total: float = 0.0
    count: float = 1.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, value: float | None) -> RunningMean:
        """With the next value; a step without one changes nothing."""
        if value is None:
            return self
        return RunningMean(DECAY * self.total + value, DECAY * self.count + 1.0)


def _narrow(states: Tensor) -> Tensor:
    width = states.shape[1]
    return states if width <= WIDEST else states @ _signs(width).to(states.device)


@lru_cache(maxsize=4)
def _signs(width: int) -> Tensor:
    """[width, WIDEST] random signs over the root of `WIDEST`, the same in every process: on average they keep all products."""
    drawn = torch.randint(0, 2, (width, WIDEST), generator=torch.Generator().manual_seed(width), dtype=torch.float32)
    return (2.0 * drawn - 1.0) / math.sqrt(WIDEST)

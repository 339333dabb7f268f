"""Drift: where a rollout leaves what the teacher would have written, and what signed sums make of it.

All functions take gaps `a[t] = lp_T[t] - lp_0[t]` [B, T] with a boolean mask, right-padded; nothing carries a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch, keep, wide
from iwopd.algo.evidence import prefix_sum

DRIFT = 2.0
"""Nats: the teacher gives the token less than 1/7 of the student's probability."""


class DriftRegions(NamedTuple):
    """Three boolean masks [B, T] that share out the valid tokens. A rollout without a drift is all `before`."""

    before: Tensor
    """Tokens before the first drift: clean prefix, no disagreement worth the name."""
    at: Tensor
    """The first drift itself, at most one token per rollout: its prefix is still clean."""
    after: Tensor
    """Every token after the first drift: its prefix has drifted."""


@torch.no_grad()
def drift_regions(gap: Tensor, mask: Tensor, threshold: float = DRIFT) -> DriftRegions:
    """Cut each rollout at its first drift: the first token with `a[t] < -threshold`, which the teacher hardly would write."""
    if not threshold > 0:
        raise ValueError(f"the drift threshold must be positive, got {threshold}")
    check_batch(mask, gap=gap)
    drifted = keep(gap, mask) < -threshold
    count = drifted.cumsum(-1)
    at = drifted & (count == 1)
    return DriftRegions(mask & (count == 0), at, mask & (count > 0) & ~at)


@torch.no_grad()
def first_drift(gap: Tensor, mask: Tensor, threshold: float = DRIFT) -> Tensor:
    """Number of valid tokens before the first drift, [B] int64; -1 in a rollout that has none."""
    regions = drift_regions(gap, mask, threshold)
    return torch.where(regions.at.any(-1), regions.before.sum(-1), -1)


@torch.no_grad()
def prefix_sums(values: Tensor, mask: Tensor) -> Tensor:
    """`sum_{k<t} values[k]`, [B, T] float64, 0 off the mask.

    Of gaps it is `log r[t]` (Eq. 14 with alpha 1), of their sizes `S[t]` (Eq. 15 without its minus).
    """
    check_batch(mask, values=values)
    return keep(prefix_sum(wide(keep(values, mask))), mask)


@torch.no_grad()
def rebound(gap: Tensor, mask: Tensor) -> Tensor:
    """The largest rise of `log r[t]` above its lowest value so far, [B] float64 in nats (Fig. 4b's local rebounds)."""
    ratio = prefix_sums(gap, mask)
    if ratio.shape[-1] == 0:
        return ratio.new_zeros(len(ratio))
    return keep(ratio - ratio.cummin(-1).values, mask).amax(-1)

"""Weight rules around a drift that are ours: cut at it, survival times share, and survival with a gate for what comes after."""

from __future__ import annotations

import math

from torch import Tensor

from iwopd.algo._checks import wide
from iwopd.algo.drift import DRIFT, drift_regions
from iwopd.algo.registry import POSITIVE, register
from iwopd.algo.weights import cumulative_share, survival

LEAST, SLOPE = 0.1, 5.0
"""Of the gate: agreement from which tokens after a drift begin to count, and how fast; at 0.3 they count in full."""
TRACE = 1e-9
"""What tokens after a drift always weigh under the gate: too little to teach, enough to see where they pull."""


@register(
    "until-drift",
    title="Until the first drift",
    family="sums",
    formula="1 up to and with the first token with a[t] < -threshold, else 0 (and out of the denominator)",
    source="ours (docs/results.md): the hard cut that survival is a soft form of",
    supervised=POSITIVE,
)
def until_drift(gap: Tensor, mask: Tensor, *, threshold: float = DRIFT) -> Tensor:
    """Train on each response up to the first token that the teacher hardly would have written."""
    regions = drift_regions(gap, mask, threshold)
    return wide(regions.before | regions.at)


@register(
    "survival-share",
    title="Survival x share",
    family="sums",
    formula="exp(-D[t] / tau) * (1 + gamma * (1 - S[t] / total)): survival times IW-OPD",
    source="ours (docs/results.md): a rival of survival",
)
def survival_share(gap: Tensor, mask: Tensor, *, tau: float = 1.0, gamma: float = 0.5) -> Tensor:
    """Nats already lost and the share still ahead, both."""
    return survival(gap, mask, tau=tau) * cumulative_share(gap, mask, gamma=gamma)


@register(
    "gated",
    title="Gated survival",
    family="sums",
    formula="f + (1 - f) * exp(-D[t] / tau),  f = clip(slope * (agreement - least), 0, 1),  agreement = running mean of"
    " cos(gradient of the tokens before drifts, of those after)",
    source="ours (docs/results.md, algo/agreement.py): survival, with as much of what follows a drift as its gradients earn",
)
def gated(
    gap: Tensor, mask: Tensor, *, agreement: float, tau: float = 1.0, least: float = LEAST, slope: float = SLOPE
) -> Tensor:
    """Survival where the teacher follows drifts, plain OPD where it leads back; which of them, the gradients say."""
    return survival(gap, mask, tau=tau, floor=max(TRACE, gate(agreement, least, slope)))


def gate(agreement: float, least: float = LEAST, slope: float = SLOPE) -> float:
    """How much the tokens after a drift count, in [0, 1]."""
    if not (math.isfinite(slope) and slope > 0):
        raise ValueError(f"slope must be positive and finite, got {slope}")
    if not -1 <= least <= 1:
        raise ValueError(f"least must lie in [-1, 1], got {least}")
    return min(1.0, max(0.0, slope * (agreement - least)))

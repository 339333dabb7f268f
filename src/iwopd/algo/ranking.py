"""Ranks, and how alike two rankings are."""

from __future__ import annotations

import math
from collections.abc import Sequence


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            found[place] = (start + 1 + end) / 2.0
        start = end
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, so ties are allowed for. NaN where one side has no ranking."""
    if len(first) != len(second):
        raise ValueError(f"two rankings of the same things have equal lengths, got {len(first)} and {len(second)}")
    ours, theirs = ranks(first), ranks(second)
    middle = (len(first) + 1) / 2.0  # the mean of any ranks
    both = math.fsum((a - middle) * (b - middle) for a, b in zip(ours, theirs, strict=True))
    squares = [math.fsum((rank - middle) ** 2 for rank in side) for side in (ours, theirs)]
    return both / math.sqrt(squares[0] * squares[1]) if min(squares, default=0.0) > 0 else math.nan

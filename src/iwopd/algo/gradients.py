"""Products of gradients that are lists of tensors, one for each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from iwopd.algo._checks import wide

DOT_ELEMENTS = 2**22
"""Elements of a dot product that are widened to float64 at a time."""


def dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """In float64, a piece at a time: a sum of a billion float32 products would lose its last digits."""
    total = 0.0
    for ours, theirs in zip(first, second, strict=True):
        pieces = zip(ours.flatten().split(DOT_ELEMENTS), theirs.flatten().split(DOT_ELEMENTS), strict=True)
        total += sum(float(torch.dot(wide(a), wide(b))) for a, b in pieces)
    return total


def cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Cosine of two gradients; NaN if one of them is zero."""
    size = math.sqrt(dot(first, first)) * math.sqrt(dot(second, second))
    return dot(first, second) / size if size > 0 else math.nan

"""Products of gradients that are lists of tensors, one for each parameter; and what many noisy ones have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from iwopd.algo._checks import wide

DOT_ELEMENTS = 2**22
"""Elements of a dot product that are widened to float64 at a time."""
SKETCH = 2**17
"""Numbers that stand for a gradient: products to within 0.3 % of the norms' product."""


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


def sketch(gradient: Sequence[Tensor], size: int = SKETCH) -> Tensor:
    """A gradient in `size` numbers, [size] on the CPU, so that many can be kept: random signs, every `size`-th element added.

    Products of sketches are those of the gradients on average over signs, within about `1 / sqrt(size)` of the product of
    their norms; of gradients with no more than `size` elements they are exact. The signs depend on the shapes alone.
    """
    total, offset = torch.zeros(size, dtype=torch.float64), 0
    for place, part in enumerate(gradient):
        flat = part.detach().flatten()
        generator = torch.Generator().manual_seed(place)  # of the host, so that all devices have the same signs
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8) * 2 - 1
        signed = flat * signs.to(flat.device)
        if len(signed) > size:
            signed = torch.nn.functional.pad(signed, (0, -len(signed) % size)).view(-1, size).sum(0, dtype=torch.float64)
        start, signed = offset % size, signed.cpu()
        total[start : start + len(signed)] += signed[: size - start]
        total[: max(0, start + len(signed) - size)] += signed[size - start :]
        offset += len(flat)
    return total.float()


def shared_signal(products: Tensor) -> float:
    """`<E x, E y>` from products [n, n] of n independent pairs: the mean of `<x[i], y[j]>` over i != j.

    Noise that x[i] and y[i] share, or have each, is not in it. NaN of fewer than two.
    """
    count = len(products)
    return float((products.sum() - products.trace()) / (count * (count - 1))) if count > 1 else math.nan


def expected_cosine(across: Tensor, first: Tensor, second: Tensor) -> float:
    """Cosine of two expected gradients, from the products [n, n] of n independent estimates x and y of them.

    `across` are `<x[i], y[j]>`, `first` those of x among themselves, `second` those of y. At most 1; NaN where the estimates do
    not agree on a direction.
    """
    sizes = shared_signal(first), shared_signal(second)
    if not min(sizes) > 0:
        return math.nan
    return max(-1.0, min(1.0, shared_signal(across) / math.sqrt(sizes[0] * sizes[1])))


def noise_over_signal(products: Tensor) -> float:
    """Length of an estimate's noise over that of its expectation, from the products [n, n] of n independent ones.

    NaN without a signal. It falls as one over the square root of the tokens.
    """
    signal = shared_signal(products)
    if not signal > 0:
        return math.nan
    return math.sqrt(max(0.0, float(products.diagonal().mean()) - signal) / signal)

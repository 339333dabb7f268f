"""Divergences as their papers write them, with nothing of the package's formulas: what tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from iwopd.algo.divergences import DivergenceKind

KINDS = [
    DivergenceKind("reverse-kl"),
    DivergenceKind("forward-kl"),
    DivergenceKind("jsd", 0.0),
    DivergenceKind("jsd", 0.3),
    DivergenceKind("jsd", 1.0),
    DivergenceKind("skew-reverse-kl", 0.2),
    DivergenceKind("skew-forward-kl", 0.0),
    DivergenceKind("skew-forward-kl", 0.7),
]


def written_out(kind: DivergenceKind, log_p: Tensor, log_q: Tensor) -> Tensor:
    """[...] from log-probs [..., V], as in the papers. Nothing of the package's formulas."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    def mixed(a: Tensor, b: Tensor, share: float) -> Tensor:
        return (share * a.exp() + (1 - share) * b.exp()).log()

    mix = kind.mix
    if kind.name == "reverse-kl" or (kind.name == "jsd" and mix == 1):
        return kl(log_p, log_q)
    if kind.name == "forward-kl" or (kind.name == "jsd" and mix == 0):
        return kl(log_q, log_p)
    assert mix is not None
    if kind.name == "jsd":
        m = mixed(log_q, log_p, mix)
        return mix * kl(log_q, m) + (1 - mix) * kl(log_p, m)
    if kind.name == "skew-reverse-kl":
        return kl(log_p, mixed(log_p, log_q, mix))
    return kl(log_q, mixed(log_q, log_p, mix))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

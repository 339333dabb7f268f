"""A weight rule and an advantage: functions that ask for evidence by the names of their parameters."""

from __future__ import annotations

from torch import Tensor


def half_life(mask: Tensor, *, tokens: float = 20.0) -> Tensor:
    """2^(-(t - 1) / tokens)"""
    if not tokens > 0:
        raise ValueError(f"tokens must be positive, got {tokens}")
    position = mask.cumsum(-1).double() - 1.0
    return 2.0 ** (-position / tokens)


def sign(gap: Tensor, *, least: float = 0.1) -> Tensor:
    """The sign of lp_T - lp_0 where it is at least `least` nats, else 0"""
    return gap.sign() * (gap.abs() >= least)

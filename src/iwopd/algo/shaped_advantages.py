"""Advantages of other papers: the gap bounded, or centred. Each is a function of one token's two log-probs, or of its KL too.

`docs/method.md` says what their papers have beside these formulas. All are detached, [B, T], 0 outside the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from iwopd.algo._checks import check_tokens, keep, wide
from iwopd.algo.advantages import advantage
from iwopd.algo.logprobs import floor_logprobs

REOPOLD_BOUND = math.log(0.1) / (1.0 - 0.1)
"""REOPOLD's `log(lam) / (1 - lam)` at its `lam = 0.1`: -2.56 nats."""


@advantage(
    "power",
    title="PowerOPD",
    formula="p_T^power - p_0^power",
    source="PowerOPD (arXiv 2606.17199), as in its public code and its recommended script",
)
@torch.no_grad()
def power_advantages(
    gap: Tensor, teacher_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, power: float = 5.0
) -> Tensor:
    """Between -1 and 1, whatever the gap. Divided by `power` it tends to the gap as `power` tends to 0.

    Computed as `sign(a) * max(p_T, p_0)^power * (1 - exp(-power |a|))`: no difference of nearly equal numbers.
    """
    if not (math.isfinite(power) and power > 0):
        raise ValueError(f"power must be positive and finite, got {power}")
    likelier = torch.maximum(floor_logprobs(teacher_logprobs, mask).logprobs, keep(old_logprobs, mask))
    a = wide(gap)
    found = a.sign() * (power * wide(likelier)).exp() * -(-power * a.abs()).expm1()
    return keep(found.to(gap.dtype), mask)


@advantage(
    "baseline",
    title="vOPD",
    formula="a + KL(student || teacher);  k > 0: the KL over the student's k likeliest ids, both renormalised on them",
    source="vOPD (arXiv 2605.07865), as in its public code; there the KL is the current policy's, here the old one's",
)
@torch.no_grad()
def baseline_advantages(gap: Tensor, kl: Tensor, mask: Tensor, *, k: int = 0) -> Tensor:
    """The gap minus its expectation over the student's next token, which is -KL: less noise, the same expected gradient.

    `kl` is evidence; `k` says over which ids it was taken (`Objective.kl_k`).
    """
    if k < 0 or k == 1:
        raise ValueError(f"k must be 0 (all ids) or at least 2, got {k}: over one id a renormalised KL is always 0")
    check_tokens("kl", kl, mask)
    return keep(gap + kl.to(gap.dtype), mask)


@advantage(
    "clipped",
    title="REOPOLD's bound",
    formula="min(max(a, low), high);  low = log(lam) / (1 - lam) at lam = 0.1 is -2.56",
    source="REOPOLD (arXiv 2603.11137), its lower bound, as in two other papers' public code; high is ours",
)
@torch.no_grad()
def clipped_advantages(gap: Tensor, mask: Tensor, *, low: float = REOPOLD_BOUND, high: float | None = None) -> Tensor:
    """The gap within bounds, in nats; without `high` only from below. PowerOPD compares itself with -5 and 5."""
    if not low <= 0:
        raise ValueError(f"low must not be positive (nats), got {low}: a token that both like equally has gap 0")
    if high is not None and not high >= 0:
        raise ValueError(f"high must not be negative (nats), got {high}: a token that both like equally has gap 0")
    return keep(gap.clamp(min=low, max=high), mask)


@advantage(
    "log-mix",
    title="TOP-D's proximal teacher",
    formula="r = log(alpha * p_T / p_0 + 1 - alpha);  future: r[t] + mean of r over the rollout's later tokens",
    source="TOP-D (arXiv 2607.04751, Eq. 8 for future), as in prime-rl's code; without its z-score over a prompt's rollouts",
)
@torch.no_grad()
def log_mix_advantages(gap: Tensor, mask: Tensor, *, alpha: float = 0.1, future: bool = False) -> Tensor:
    """The gap to a teacher mixed with the old policy: never below `log(1 - alpha)`. `alpha = 1` is OPD exactly."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must lie in (0, 1], got {alpha}")
    rest = math.log1p(-alpha) if alpha < 1 else -math.inf
    found = keep(torch.logaddexp(gap + math.log(alpha), torch.full_like(gap, rest)), mask)
    if not future:
        return found
    so_far = wide(found).cumsum(-1)
    later = so_far[..., -1:] - so_far
    count = mask.sum(-1, keepdim=True) - mask.cumsum(-1)
    return keep(found + torch.where(count > 0, later / count.clamp(min=1), 0.0).to(found.dtype), mask)

"""The clipped policy loss on log-probs; `fused_loss` is the same straight from hidden states.

Both are a sum over tokens divided by the caller's `denominator`: the number of supervised tokens of the *whole* optimizer step,
over all micro-batches and ranks. So losses and gradients of any split add up to those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iwopd.algo._checks import check_all, keep, on_cpu

CLIP = 0.2
DUAL_CLIP = 3.0

LOG_RATIO_LIMIT = 20.0
"""`|lp - lp_0|` is clamped here before it is exponentiated: exp(89) is inf in float32 and 0 * inf is NaN in a gradient.
A ratio of e^20 lies beyond the clip and the dual clip by eight orders of magnitude, so under both no gradient changes. Without
a dual clip a negative advantage has no gradient beyond it, and `ratio_max` and `approx_kl` are those of the clamped ratio."""


@dataclass(frozen=True)
class PolicyStats:
    """Detached counts and sums over the tokens of a loss; `merge` adds those of several micro-batches."""

    tokens: Tensor
    clipped_high: Tensor
    """Tokens whose ratio was cut at `1 + clip` (positive advantage), []."""
    clipped_low: Tensor
    """Tokens whose ratio was cut at `1 - clip` (negative advantage), []."""
    dual_clipped: Tensor
    """Tokens whose loss was capped by the dual clip, []."""
    kl_sum: Tensor
    """Sum of the low-variance estimate `(eta - 1) - log eta` of KL(old || current), []."""
    ratio_min: Tensor
    """Smallest `eta`, [] (+inf without tokens)."""
    ratio_max: Tensor
    """Largest `eta`, [] (-inf without tokens)."""

    @property
    def clip_fraction(self) -> Tensor:
        return (self.clipped_high + self.clipped_low) / self.tokens.clamp(min=1)

    @property
    def dual_clip_fraction(self) -> Tensor:
        return self.dual_clipped / self.tokens.clamp(min=1)

    @property
    def approx_kl(self) -> Tensor:
        return self.kl_sum / self.tokens.clamp(min=1)

    @classmethod
    def merge(cls, parts: list[PolicyStats]) -> PolicyStats:
        """The statistics of several disjoint sets of tokens taken together."""
        if not parts:
            raise ValueError("nothing to merge: the list of statistics is empty")

        def stack(name: str) -> Tensor:
            return torch.stack([getattr(part, name) for part in parts])

        sums = {name: stack(name).sum(0) for name in ("tokens", "clipped_high", "clipped_low", "dual_clipped", "kl_sum")}
        return cls(**sums, ratio_min=stack("ratio_min").amin(0), ratio_max=stack("ratio_max").amax(0))

    @classmethod
    def empty(cls) -> PolicyStats:
        zero, infinity = torch.zeros(()), torch.full((), torch.inf)
        return cls(zero, zero, zero, zero, zero, infinity, -infinity)

    def cpu(self) -> PolicyStats:
        return PolicyStats(**on_cpu(vars(self)))

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for a log line; ratios are 1 where there were no tokens."""
        names = ("clip_fraction", "dual_clip_fraction", "approx_kl", "ratio_min", "ratio_max")
        numbers = {name: float(getattr(self, name)) for name in names}
        return numbers if self.tokens > 0 else {**numbers, "ratio_min": 1.0, "ratio_max": 1.0}


@dataclass(frozen=True)
class PolicyLoss:
    """What a policy loss returns."""

    loss: Tensor
    """Sum over valid tokens divided by the denominator, []; carries the gradient."""
    stats: PolicyStats


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor,
    clip: float = CLIP,
    dual_clip: float | None = DUAL_CLIP,
    correction: Tensor | None = None,
    kl_coef: float = 0.0,
    reference_logprobs: Tensor | None = None,
    entropy_coef: float = 0.0,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """Clipped PPO surrogate, Eq. 67 of the paper (Appendix "Algorithm"), with dual clip and rollout correction.

    Per token, with `eta = exp(lp - lp_0)` and `A` the (already weighted) advantage:
    `max(-A * eta, -A * clip(eta, 1 - clip, 1 + clip))`, for `A < 0` at most `-A * dual_clip`, times `correction`.
    Summed over the mask and divided by `denominator` (valid tokens of the whole step; supervised ones under
    prefix-/suffix-only, see `supervised_mask`).

    Two coefficients, 0 by default: `kl_coef` adds the low-variance KL to the reference, `entropy_coef` subtracts the
    mean `entropy` (from `token_entropy`). Only `logprobs` and `entropy` carry gradients. Any shape; masks may have holes.
    """
    check_loss_arguments(denominator, clip, dual_clip)
    if kl_coef and reference_logprobs is None:
        raise ValueError("kl_coef is not 0: reference_logprobs are needed")
    if entropy_coef and entropy is None:
        raise ValueError("entropy_coef is not 0: the entropy of each token is needed (algo.token_entropy)")
    reference_logprobs, entropy = reference_logprobs if kl_coef else None, entropy if entropy_coef else None
    optional = {"correction": correction, "reference_logprobs": reference_logprobs, "entropy": entropy}
    given = {name: values for name, values in optional.items() if values is not None}
    check_all(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, **given)
    return checked_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        denominator=denominator,
        clip=clip,
        dual_clip=dual_clip,
        correction=correction,
        kl_coef=kl_coef,
        reference_logprobs=reference_logprobs,
        entropy_coef=entropy_coef,
        entropy=entropy,
    )


def checked_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor,
    clip: float,
    dual_clip: float | None,
    correction: Tensor | None = None,
    kl_coef: float = 0.0,
    reference_logprobs: Tensor | None = None,
    entropy_coef: float = 0.0,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """`policy_loss` of arguments that were checked."""
    # Select before any arithmetic: NaN outside the mask must reach neither the value nor the gradient.
    log_ratio = (keep(logprobs, mask) - keep(old_logprobs, mask).detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    advantage = keep(advantages, mask).detach()

    plain = -advantage * ratio
    cut = -advantage * ratio.clamp(1.0 - clip, 1.0 + clip)
    per_token = torch.maximum(plain, cut)
    capped = torch.zeros_like(mask)
    if dual_clip is not None:
        cap = -advantage * dual_clip
        capped = (advantage < 0) & (per_token > cap)
        per_token = torch.where(advantage < 0, torch.minimum(per_token, cap), per_token)
    if correction is not None:
        per_token = per_token * keep(correction, mask).detach()
    if kl_coef and reference_logprobs is not None:
        per_token = per_token + kl_coef * _low_variance_kl(logprobs, reference_logprobs, mask)
    if entropy_coef and entropy is not None:
        per_token = per_token - entropy_coef * keep(entropy, mask)

    stats = _statistics(log_ratio, ratio, advantage, mask, clip, capped)
    return PolicyLoss(per_token.sum() / denominator, stats)


@torch.no_grad()
def _statistics(log_ratio: Tensor, ratio: Tensor, advantage: Tensor, mask: Tensor, clip: float, capped: Tensor) -> PolicyStats:
    infinity = torch.full((), torch.inf, dtype=ratio.dtype, device=ratio.device)
    lowest, highest = torch.where(mask, ratio, infinity), torch.where(mask, ratio, -infinity)
    return PolicyStats(
        tokens=mask.sum(),
        clipped_high=(mask & (advantage > 0) & (ratio > 1.0 + clip)).sum(),
        clipped_low=(mask & (advantage < 0) & (ratio < 1.0 - clip)).sum(),
        dual_clipped=capped.sum(),
        kl_sum=(torch.expm1(log_ratio) - log_ratio).sum(),  # 0 outside the mask, where the ratio is 1
        ratio_min=lowest.amin() if mask.numel() else infinity,
        ratio_max=highest.amax() if mask.numel() else -infinity,
    )


def low_variance_kl(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(student || reference) per token: `exp(d) - 1 - d`, `d = lp_R - lp`, cut at 20 from above."""
    check_all(mask, logprobs=logprobs, reference_logprobs=reference_logprobs)
    return _low_variance_kl(logprobs, reference_logprobs, mask)


def _low_variance_kl(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    difference = (keep(reference_logprobs, mask).detach() - keep(logprobs, mask)).clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(difference) - difference


def check_denominator(denominator: float | Tensor) -> None:
    """Refuse one that is not positive."""
    if not float(denominator) > 0:
        raise ValueError(
            f"denominator must be positive, got {float(denominator)}: it is the number of supervised tokens of the "
            "whole optimizer step; skip a step that has none"
        )


def check_loss_arguments(denominator: float | Tensor, clip: float, dual_clip: float | None) -> None:
    """Refuse a denominator, clip or dual clip that makes no sense."""
    check_denominator(denominator)
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")

"""Rollout correction: what to do when another engine (vLLM) generated the tokens with slightly other probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo._checks import check_all, keep
from iwopd.algo.noise import mean_difference

CORRECTION_THRESHOLD = 5.0
"""Where importance ratios are truncated (Tab. 6)."""


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, threshold: float = CORRECTION_THRESHOLD
) -> Tensor:
    """Truncated importance ratio `min(exp(lp_0[t] - lp_rollout[t]), threshold)`, detached, 0 outside the mask.

    It multiplies the loss of each token ("Rollout importance correction: token-level, threshold 5.0", Tab. 6 of
    the paper). `lp_0` is the trainer's own log-prob; `lp_rollout` the engine's, used nowhere else.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}")
    check_all(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    return keep((old_logprobs - rollout_logprobs).exp().clamp(max=threshold), mask)


class Mismatch(NamedTuple):
    """How far another engine's log-probs are from the trainer's, over the valid tokens of a batch."""

    mean_ratio: float
    """Mean of `exp(lp_0 - lp_rollout)`, not truncated; near 1 whenever the engine samples what it says it does."""
    largest_deviation: float
    """Largest `|ratio - 1|`."""
    truncated: float
    """Share of tokens whose ratio is above the threshold."""
    mean_difference: float
    """Mean `|lp_0 - lp_rollout|`."""


@torch.no_grad()
def rollout_mismatch(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, threshold: float = CORRECTION_THRESHOLD
) -> Mismatch:
    """Statistics of the ratio that `rollout_correction` truncates; those of an exact engine if there are no tokens."""
    check_all(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    ours, theirs = old_logprobs[mask], rollout_logprobs[mask]
    if not ours.numel():
        return Mismatch(1.0, 0.0, 0.0, 0.0)
    ratio = (ours - theirs).double().exp()
    return Mismatch(
        mean_ratio=float(ratio.mean()),
        largest_deviation=float((ratio - 1).abs().max()),
        truncated=float((ratio > threshold).double().mean()),
        mean_difference=mean_difference(ours, theirs),
    )

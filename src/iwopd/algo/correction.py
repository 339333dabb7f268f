"""Rollout correction: what to do when another engine (vLLM) generated the tokens with slightly other probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from iwopd.algo._checks import check_mask, check_tokens, keep


@torch.no_grad()
def rollout_correction(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, threshold: float = 5.0) -> Tensor:
    """Truncated importance ratio `min(exp(lp_0[t] - lp_rollout[t]), threshold)`, detached, 0 outside the mask.

    It multiplies the loss of each token ("Rollout importance correction: token-level, threshold 5.0", Tab. 6 of
    the paper). `lp_0` is the trainer's own log-prob; `lp_rollout` the engine's, used nowhere else.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}")
    check_mask(mask)
    check_tokens("old_logprobs", old_logprobs, mask)
    check_tokens("rollout_logprobs", rollout_logprobs, mask)
    return keep((old_logprobs - rollout_logprobs).exp().clamp(max=threshold), mask)

"""Token advantages: what the teacher says about each token the student wrote. All detached, 0 outside the mask.

Shapes: every tensor is [B, T], right-padded; `mask` is boolean and true on the response's valid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from iwopd.algo._checks import check_mask, check_tokens, keep, wide
from iwopd.algo.logprobs import floor_logprobs


@torch.no_grad()
def opd_advantages(teacher_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Standard OPD: `A[t] = lp_T[t] - lp_0[t]`, the teacher's log-prob minus the rollout policy's.

    Eq. 6 of "On the Position Bias of On-Policy Distillation" (A^OPD). It is also the *gap* that every weight rule
    accumulates. A teacher log-prob of -inf counts as `LOGPROB_FLOOR`; NaN on a valid token is an error.
    """
    check_mask(mask)
    check_tokens("old_logprobs", old_logprobs, mask)
    return keep(floor_logprobs(teacher_logprobs, mask).logprobs - old_logprobs, mask)


@torch.no_grad()
def exopd_advantages(
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    scale: float = 1.25,
    weights: Tensor | None = None,
) -> Tensor:
    """ExOPD's extrapolated reward (from G-OPD), and IW-ExOPD when `weights` are given.

    ExOPD:    `A[t] = scale * (lp_T[t] - lp_R[t]) - (lp_0[t] - lp_R[t])`
    IW-ExOPD: `A[t] = scale * w[t] * (lp_T[t] - lp_R[t]) - (lp_0[t] - lp_R[t])`

    The second line is this project's reading of "making the reward scale prefix-dependent" (Appendix "Combination
    experiments"; the paper prints no formula). The weights are then *inside* the advantage: do not apply them again.
    To weight the whole ExOPD advantage instead, leave `weights` out and multiply the result.

    Both are computed as `(lp_T - lp_0) + (scale * w - 1) * (lp_T - lp_R)`: the same number, and `scale = 1` is OPD
    and `w = 1` is ExOPD to the last bit.
    """
    gap = opd_advantages(teacher_logprobs, old_logprobs, mask)
    teacher = floor_logprobs(teacher_logprobs, mask).logprobs
    reference = floor_logprobs(reference_logprobs, mask, name="reference_logprobs").logprobs
    reward = keep(teacher - reference, mask)
    if weights is None:
        return keep(gap + (scale - 1.0) * reward, mask)
    check_tokens("weights", weights, mask)
    factor = (scale * wide(weights) - 1.0).to(reward.dtype)  # rounded once, like `scale - 1` above
    return keep(gap + factor * reward, mask)

"""From scores to what the loss receives: one advantage, one weight rule, put together in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from iwopd.algo.advantages import exopd_advantages, opd_advantages
from iwopd.algo.weights import supervised_mask, token_weights

AdvantageName = Literal["opd", "exopd"]
Weighting = Literal["reward-scale", "advantage"]


@dataclass(frozen=True)
class TrainingSignal:
    """Per-token tensors [B, T] of a batch of whole rollouts, all detached, 0 (or false) outside the mask."""

    mask: Tensor
    """Boolean: the valid tokens it was made from."""
    gap: Tensor
    """`a[t] = lp_T[t] - lp_0[t]`."""
    weights: Tensor
    """`w[t]` of the weight rule."""
    advantages: Tensor
    """What the loss receives: the advantage with the weights applied, once (Eq. 13)."""
    supervised: Tensor
    """Boolean: the tokens that the loss sums over and its denominator counts."""


@torch.no_grad()
def training_signal(
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    advantage: AdvantageName = "opd",
    weights: str = "uniform",
    weight_params: Mapping[str, Any] | None = None,
    progress: float | None = None,
    reference_logprobs: Tensor | None = None,
    scale: float = 1.25,
    weighting: Weighting = "reward-scale",
) -> TrainingSignal:
    """Gap, weights and weighted advantages of whole rollouts, before any split into micro-batches.

    `opd` with `cumulative-share` is IW-OPD (Algorithm 1). Under `exopd` the weights go into the reward's scale (IW-ExOPD),
    or with `weighting="advantage"` onto the whole advantage; with `uniform` weights both are plain ExOPD.
    """
    params = dict(weight_params or {})
    gap = opd_advantages(teacher_logprobs, old_logprobs, mask)
    token_weight = token_weights(weights, gap, mask, progress=progress, **params)
    supervised = supervised_mask(weights, mask, **params)
    if advantage == "opd":
        weighted = gap * token_weight
    elif advantage == "exopd":
        if reference_logprobs is None:
            raise ValueError("the advantage 'exopd' needs reference_logprobs")
        if weighting == "reward-scale":
            weighted = exopd_advantages(teacher_logprobs, old_logprobs, reference_logprobs, mask, scale, token_weight)
        elif weighting == "advantage":
            weighted = exopd_advantages(teacher_logprobs, old_logprobs, reference_logprobs, mask, scale) * token_weight
        else:
            raise ValueError(f"weighting must be one of {get_args(Weighting)}, got {weighting!r}")
    else:
        raise ValueError(f"advantage must be one of {get_args(AdvantageName)}, got {advantage!r}")
    return TrainingSignal(mask, gap, token_weight, torch.where(supervised, weighted, 0.0), supervised)

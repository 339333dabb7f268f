"""Task rewards as advantages: how much better a rollout is than the others of its prompt, spread over its tokens.

One number per rollout, in [0, 1]; NaN means that there is no verdict. A rollout without a verdict has advantage 0 and does not
enter the mean of its group: no verdict is not a wrong answer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch_mask, keep, wide

Normalize = Literal["deviation", "mean", "none"]
DEVIATION_EPS = 1e-6
"""Added to a group's deviation, as verl does (TRL: 1e-4; the paper prints none)."""


@torch.no_grad()
def group_advantages(rewards: Tensor, groups: Tensor, *, normalize: Normalize = "deviation") -> Tensor:
    """[B] advantages, in float64, of rewards [B] whose rollouts belong to the groups [B] (integers, in any order).

    - `deviation`: `A = (r - mean) / (std + eps)` over the group: GRPO (arXiv 2402.03300, Sec. 4.1.2). The deviation is the
      unbiased one (n - 1), as in verl and TRL; the paper does not say which.
    - `mean`: `A = r - mean`: Dr. GRPO (arXiv 2503.20783). The division favours prompts that are nearly always or nearly never
      solved, whose deviation is small.
    - `none`: `A = r`.

    A group with one verdict, or with equal rewards, has nothing to compare: 0, except with `none`.
    """
    judged, place, count = _grouped(rewards, groups)
    values = torch.where(judged, wide(rewards), 0.0)
    if normalize == "none":
        return values
    if normalize not in ("deviation", "mean"):
        raise ValueError(f"normalize must be 'deviation', 'mean' or 'none', got {normalize!r}")

    def total(of_rollouts: Tensor) -> Tensor:  # [G]
        return torch.zeros_like(count).index_add(0, place, of_rollouts)

    mean = total(values) / count.clamp(min=1)
    centred = torch.where(judged & _differ(rewards, judged, place, count)[place], values - mean[place], 0.0)
    if normalize == "mean":
        return centred
    deviation = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation[place] + DEVIATION_EPS)


@torch.no_grad()
def differing_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[G] boolean: the groups (sorted by number) whose verdicts differ. From the others a comparison learns nothing."""
    judged, place, count = _grouped(rewards, groups)
    return _differ(rewards, judged, place, count)


@torch.no_grad()
def reward_advantages(
    rewards: Tensor, groups: Tensor, mask: Tensor, *, coefficient: float = 1.0, normalize: Normalize = "deviation"
) -> Tensor:
    """[B, T] float64: `coefficient` times the rollout's `group_advantages` on each of its tokens, 0 outside the mask."""
    return coefficient * spread_over_tokens(group_advantages(rewards, groups, normalize=normalize), mask)


@torch.no_grad()
def spread_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: one number of each rollout [B] on all its valid tokens, 0 outside the mask."""
    check_batch_mask(mask)
    if values.shape != mask.shape[:1]:
        raise ValueError(f"values have shape {list(values.shape)}, the mask {list(mask.shape)}: one number per rollout")
    return keep(values[:, None].expand(mask.shape), mask)


def _grouped(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B] whether there is a verdict, [B] the place of the rollout's group, [G] verdicts of each group."""
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards and groups must both be [B], got {list(rewards.shape)} and {list(groups.shape)}")
    if groups.dtype.is_floating_point or groups.dtype == torch.bool:
        raise TypeError(f"groups must be integers, got {groups.dtype}")
    judged = ~torch.isnan(rewards)
    outside = judged & ~((rewards >= 0) & (rewards <= 1))
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"the reward of row {row} is {float(rewards[row])}; it must lie in [0, 1], or be NaN: no verdict")
    names, place = groups.unique(return_inverse=True)
    count = wide(torch.zeros(len(names), device=rewards.device)).index_add(0, place, wide(judged))
    return judged, place, count


def _differ(rewards: Tensor, judged: Tensor, place: Tensor, count: Tensor) -> Tensor:
    """[G] whether a group has two different rewards. By comparison, as a mean of equal numbers may be off by a rounding."""
    low = torch.full_like(count, 2.0).scatter_reduce(0, place, wide(torch.where(judged, rewards, 2.0)), "amin")
    high = torch.full_like(count, -1.0).scatter_reduce(0, place, wide(torch.where(judged, rewards, -1.0)), "amax")
    return high > low

"""Statistics by position: where in an answer the two models disagree, and where the weights go.

Positions are counted over valid tokens, as a fraction of the response (`fraction_bins`) or in tokens (`position_bins`). A
statistic keeps its sums per rollout, so that batches can be concatenated and intervals taken over rollouts later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch, check_batch_mask, check_tokens, keep, wide


@dataclass(frozen=True)
class Binned:
    """A per-token quantity summed into K bins of position, rollout by rollout."""

    sums: Tensor
    """[B, K] float64."""
    counts: Tensor
    """[B, K] int64: tokens of the rollout in the bin."""

    @property
    def mean(self) -> Tensor:
        """Mean over the tokens of a bin, [K]; NaN where a bin has none."""
        return self.sums.sum(0) / self.counts.sum(0)

    @property
    def rollout_means(self) -> Tensor:
        """Mean of each rollout in each bin, [B, K]; NaN where it has no token there."""
        return self.sums / self.counts

    @property
    def share(self) -> Tensor:
        """Each bin's part of the sum over all bins, [K]; zeros where that sum is 0."""
        total = self.sums.sum()
        return self.sums.sum(0) / total if total != 0 else torch.zeros_like(self.sums.sum(0))

    @classmethod
    def concatenate(cls, parts: list[Binned]) -> Binned:
        """Several batches as one."""
        return cls(torch.cat([part.sums for part in parts]), torch.cat([part.counts for part in parts]))


@torch.no_grad()
def fraction_bins(mask: Tensor, bins: int = 10) -> Tensor:
    """Bin of each token by fraction of its response, `floor((t-1) * bins / T)`, [B, T] int64; -1 outside the mask."""
    check_batch_mask(mask)
    _check_positive("bins", bins)
    position = mask.cumsum(-1) - 1
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, position * bins // length, -1)


@torch.no_grad()
def position_bins(mask: Tensor, width: int = 1, bins: int | None = None) -> Tensor:
    """Bin of each token by absolute position, `floor((t-1) / width)`; -1 outside the mask and at or past `bins`."""
    check_batch_mask(mask)
    _check_positive("width", width)
    if bins is not None:
        _check_positive("bins", bins)
    index = torch.div(mask.cumsum(-1) - 1, width, rounding_mode="floor")
    inside = mask if bins is None else mask & (index < bins)
    return torch.where(inside, index, -1)


@torch.no_grad()
def bin_values(values: Tensor, index: Tensor, bins: int) -> Binned:
    """Sum per-token `values` [B, T] into the bins of `index` (from `fraction_bins` or `position_bins`)."""
    inside = index >= 0
    check_tokens("values", values, inside)
    slot = torch.where(inside, index, bins)  # what is in no bin goes into one more, which is dropped
    shape = (index.shape[0], bins + 1)
    kept = wide(keep(values, inside))
    sums = torch.zeros(shape, dtype=kept.dtype, device=values.device).scatter_add_(1, slot, kept)
    counts = torch.zeros(shape, dtype=torch.long, device=values.device).scatter_add_(1, slot, inside.long())
    return Binned(sums[:, :bins], counts[:, :bins])


@torch.no_grad()
def cumulative_loglikelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-likelihood of the prefix up to and including each token, `sum_{k<=t} lp[k]` (Fig. 3c), [B, T] float64."""
    check_batch(mask, logprobs=logprobs)
    return keep(wide(keep(logprobs, mask)).cumsum(-1), mask)


@dataclass(frozen=True)
class PositionProfile:
    """What a batch looks like along its responses. K bins; optional parts are None when their input was not given."""

    by: Literal["fraction", "position"]
    edges: Tensor
    """Left edges and the last right edge, [K + 1]: fractions of the response, or tokens."""
    tokens: Tensor
    """Tokens in each bin, [K]."""
    abs_gap: Binned
    """Mean |lp_T - lp_0|; its `share` is the share of the total discrepancy."""
    kl: Binned | None = None
    weights: Binned | None = None
    student_loglikelihood: Binned | None = None
    """Log-likelihood of the prefix under the student."""
    teacher_loglikelihood: Binned | None = None


@torch.no_grad()
def position_profile(
    gap: Tensor,
    mask: Tensor,
    *,
    by: Literal["fraction", "position"] = "fraction",
    bins: int | None = None,
    width: int = 1,
    kl: Tensor | None = None,
    weights: Tensor | None = None,
    student_logprobs: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
) -> PositionProfile:
    """Statistics by position of a batch [B, T]: |gap| and, where given, KL, weights and both prefix log-likelihoods.

    `by="fraction"` cuts every response into `bins` equal parts (default 10); `by="position"` uses `width` tokens a bin,
    `bins` of them (default: as many as the longest response fills).
    """
    check_batch_mask(mask)
    if by == "fraction":
        bins = 10 if bins is None else bins
        index = fraction_bins(mask, bins)
        edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    elif by == "position":
        index = position_bins(mask, width, bins)
        if bins is None:
            bins = int(index.max()) + 1 if index.numel() else 0
        edges = torch.arange(bins + 1, dtype=torch.float64) * width
    else:
        raise ValueError(f"by must be 'fraction' or 'position', got {by!r}")
    more = {"kl": kl, "weights": weights}
    for name, logprobs in (("student", student_logprobs), ("teacher", teacher_logprobs)):
        more[f"{name}_loglikelihood"] = None if logprobs is None else cumulative_loglikelihood(logprobs, mask)
    binned = {name: bin_values(values, index, bins) for name, values in more.items() if values is not None}
    abs_gap = bin_values(gap.abs(), index, bins)
    return PositionProfile(by, edges, abs_gap.counts.sum(0), abs_gap, **binned)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")

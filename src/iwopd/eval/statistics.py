"""Intervals for accuracies: bootstrap over problems, because samples of one problem are not independent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A mean and its interval, in the units of the scores."""

    mean: float
    low: float
    high: float


def bootstrap_interval(scores: Tensor, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean of `scores` [N, K] (problems x samples or seeds) with a percentile interval over problems."""
    if scores.dim() != 2 or scores.numel() == 0:
        raise ValueError(f"scores must be [problems, samples] and not empty, got {list(scores.shape)}")
    per_problem = scores.double().mean(1)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(per_problem), (resamples, len(per_problem)), generator=generator)
    means = per_problem[picks].mean(1)
    tail = (1.0 - level) / 2.0
    low, high = torch.quantile(means, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Interval(float(per_problem.mean()), low, high)

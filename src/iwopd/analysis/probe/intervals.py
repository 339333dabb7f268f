"""Intervals over prompts, for whole curves at once.

The prompt is the unit: rollouts of one prompt are not independent, and neither are the tokens of one rollout. A statistic here
is a function of sums over rollouts (a mean over tokens is `sum / count`). One set of resamples serves all statistics of a
probe, so that their differences can be taken resample by resample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from iwopd.algo.position import Binned
from iwopd.analysis.probe.result import Curve, Estimate
from iwopd.eval.statistics import t_quantile

RESAMPLES = 2000
LEVEL = 0.95


class Bootstrap:
    """Percentile bootstrap over prompts, tails widened to Student's t as in `eval.statistics.interval_over_problems`."""

    def __init__(self, prompts: Sequence[int], *, seed: int = 0, resamples: int = RESAMPLES) -> None:
        """`prompts` [B] says which prompt, numbered from 0, each rollout answers."""
        self.prompts = torch.tensor(prompts, dtype=torch.long)
        self.count = len(self.prompts.unique())
        if self.count != (int(self.prompts.max()) + 1 if len(self.prompts) else 0):
            raise ValueError("prompts must be numbered from 0 without gaps")
        draws = torch.randint(self.count, (resamples, self.count), generator=torch.Generator().manual_seed(seed))
        times = torch.zeros(resamples, self.count, dtype=torch.float64).scatter_add_(1, draws, torch.ones(draws.shape).double())
        self.times = torch.cat([torch.ones(1, self.count, dtype=torch.float64), times])
        """[1 + resamples, prompts]: how often each prompt counts; first as it is."""

    def resampled(self, statistic: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """The statistic of the sums over rollouts of `values` [B, ...]: [1 + resamples, ...], the observed one first."""
        sums = []
        for value in values:
            flat = value.double().reshape(len(value), -1)
            by_prompt = torch.zeros(self.count, flat.shape[1], dtype=torch.float64).index_add_(0, self.prompts, flat)
            sums.append((self.times @ by_prompt).reshape(-1, *value.shape[1:]))
        return statistic(*sums)

    def curve(self, statistic: Callable[..., Tensor], *values: Tensor) -> Curve:
        """The statistic [K] with its interval at each place."""
        return Curve(**{name: value.tolist() for name, value in self._interval(statistic, values).items()})

    def estimate(self, statistic: Callable[..., Tensor], *values: Tensor) -> Estimate:
        return Estimate(**{name: float(value) for name, value in self._interval(statistic, values).items()})

    def mean_curve(self, binned: Binned) -> Curve:
        """Mean over the tokens of each bin."""
        return self.curve(torch.div, binned.sums, binned.counts)

    def share_curve(self, binned: Binned) -> Curve:
        """Each bin's part of the total."""
        return self.curve(lambda sums: sums / sums.sum(-1, keepdim=True), binned.sums)

    def mean(self, values: Tensor) -> Estimate:
        """Mean over rollouts of one number [B] each."""
        return self.estimate(torch.div, values, torch.ones_like(values))

    def _interval(self, statistic: Callable[..., Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
        resampled = self.resampled(statistic, *values)
        nothing = torch.full_like(resampled[0], math.nan)
        if self.count < 2:
            return {"mean": resampled[0], "low": nothing, "high": nothing}
        tail = NormalDist().cdf(-math.sqrt(self.count / (self.count - 1)) * t_quantile(LEVEL, self.count - 1))
        # A resample may miss all rollouts that reach a bin; it then has no say there.
        low, high = resampled[1:].nanquantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64), dim=0)
        return {"mean": resampled[0], "low": low, "high": high}


def jackknife(statistic: Callable[[Tensor], float], count: int) -> Estimate:
    """A statistic of `count` batches, given by their numbers, with Student's t interval of its jackknife pseudo-values."""
    numbers = torch.arange(count)
    whole = statistic(numbers)
    if count < 3:
        return Estimate(mean=whole)
    pseudo = [count * whole - (count - 1) * statistic(numbers[numbers != left]) for left in range(count)]
    if any(map(math.isnan, pseudo)):  # without one of the batches there is nothing to measure
        return Estimate(mean=whole)
    half = t_quantile(LEVEL, count - 1) * float(torch.tensor(pseudo, dtype=torch.float64).std()) / math.sqrt(count)
    return Estimate(mean=whole, low=whole - half, high=whole + half)


def over_batches(values: Sequence[float]) -> Estimate:
    """Mean of one number per batch with Student's t interval; batches without one (NaN) are left out."""
    found = torch.tensor([value for value in values if not math.isnan(value)], dtype=torch.float64)
    mean = float(found.mean())
    if len(found) < 2:
        return Estimate(mean=mean)  # NaN, so None, of nothing
    half = t_quantile(LEVEL, len(found) - 1) * float(found.std()) / math.sqrt(len(found))
    return Estimate(mean=mean, low=mean - half, high=mean + half)

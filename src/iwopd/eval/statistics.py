"""What evaluation scores say, and how sure one can be: intervals, paired tests, power.

    metric (scores [N, K]) --> values [N]          `eval.per_problem`
    values of two models   --> differences [S, N]  S training seeds, N problems
    differences            --> interval and p      over problems (these models) or over seeds and problems (the methods)
    differences            --> how many samples, problems or seeds would settle it

Problems are the unit, because samples of one problem are not independent; where several runs share their models (a lineage, a
student), what they share is (`over_units`). Several tasks are strata: a list with one
tensor per task, each task with equal weight, as in the paper's Avg column. `docs/evaluation.md` has the protocol in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 4000
FLIPS = 9999
EXACT_FLIPS = 16
"""Up to so many differing problems, all sign patterns are enumerated."""
LEAST_UNITS = 4
"""Independent units that a verdict takes: below that a t interval is so wide that it says nothing but the number of units."""
ALPHA = 0.05


class Interval(NamedTuple):
    """A mean and its interval, in the units of the scores."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        return Interval(*(factor * value for value in self))

    def __format__(self, form: str) -> str:
        """`12.3 (10.1 to 14.5)` for `.1f`."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


# --- intervals -------------------------------------------------------------------------------------------------------


def interval_over_problems(
    strata: Sequence[Tensor],
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean over strata of the means of values [N], with a percentile bootstrap interval over the problems within each.

    Covers which problems were drawn and the sampling noise within them, not the training seed: it speaks about these models
    on problems like these, not about the methods that made them.

    With few problems a percentile interval is too narrow (by 6 % for 30), so its tails are widened to those of Student's t
    (Hesterberg 2015, the "expanded percentile" interval). If all values are equal there is nothing to resample; then the
    interval says how many other problems there may be if none was seen in N (the "rule of three").
    """
    tail = (1.0 - _level(level)) / 2.0
    mean = sum(float(values.double().mean()) for values in strata) / len(strata)
    if all(_constant(values) for values in strata):
        unseen = sum(1.0 - tail ** (1.0 / len(values)) for values in strata) / len(strata)
        return Interval(mean, mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean))
    fewest = min(len(values) for values in strata if not _constant(values))
    expanded = NormalDist().cdf(-math.sqrt(fewest / (fewest - 1)) * t_quantile(level, fewest - 1))
    return Interval(mean, *_quantiles(_resampled_means(strata, resamples, seed), expanded))


class UnitEffect(NamedTuple):
    """A mean over independent units, its t interval and the p-value of the same t, so that they never disagree."""

    interval: Interval
    """Bounds are NaN with one unit."""
    p_value: float
    """1 with one unit."""
    units: int

    @property
    def enough(self) -> bool:
        """Whether there are units enough for a verdict."""
        return self.units >= LEAST_UNITS


def over_units(means: Sequence[float], *, level: float = 0.95) -> UnitEffect:
    """Student's t over the means of independent units (lineages of models, students): their spread is the only one that counts.

    What happens within a unit (training seeds, problems, samples) is averaged before. Runs of one unit share its models: taken
    as independent they raise false alarms in a fifth to two fifths of experiments (`tests/unit/test_units.py`, two lineages).
    """
    count = len(means)
    if count == 0:
        raise ValueError("no unit: a mean takes at least one")
    mean = math.fsum(means) / count
    if count == 1:
        return UnitEffect(Interval(mean, math.nan, math.nan), 1.0, 1)
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1)
    error = max(math.sqrt(variance / count), 1e-12)  # equal means have no spread, not an infinite t
    half = t_quantile(_level(level), count - 1.0) * error
    return UnitEffect(Interval(mean, mean - half, mean + half), t_two_sided(mean / error, count - 1.0), count)


class Crossed(NamedTuple):
    """Variance of a mean over S seeds x N problems, by where it comes from (two-way random effects)."""

    mean: float
    problems: float
    """Which problems were drawn, with all noise that is not common to them: falls as 1 / problems."""
    problems_df: float
    seeds: float
    """What training seeds add to that, moving all problems together: falls as 1 / seeds."""
    seeds_df: float
    rest: float
    """Part of `problems` that is peculiar to seed and problem, sampling noise included: falls as 1 / seeds, too."""

    def half_width(self, level: float) -> float:
        at_problems, at_seeds = t_quantile(level, self.problems_df), t_quantile(level, self.seeds_df)
        return math.sqrt(at_problems**2 * self.problems + at_seeds**2 * self.seeds)

    def interval(self, level: float = 0.95, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Interval:
        half = self.half_width(_level(level))
        return Interval(self.mean, max(bounds[0], self.mean - half), min(bounds[1], self.mean + half))

    @property
    def p_value(self) -> float:
        """1 minus the level at which the interval just touches zero."""
        low, high = math.log(1e-9), 0.0  # of p
        for _ in range(40):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.half_width(1.0 - math.exp(middle)) > abs(self.mean) else (low, middle)
        return math.exp(high)


def crossed(strata: Sequence[Tensor]) -> Crossed | None:
    """Variance over training seeds *and* problems of values [S, N] (one tensor per task). None if it cannot be estimated.

    Every seed meets every problem: a two-way random-effects layout, as in radiology's studies of readers and cases (Dorfman,
    Berbaum and Metz 1992). With the mean squares divided by S N, the variance of the mean is

        V_problems + max(V_seeds - V_rest, 0)

    and the interval adds the half-widths of the two in quadrature, each with its own t: N - 1 degrees of freedom for the
    problems, S - 1 for the seeds (the idea of Graybill and Wang 1980). So it is never narrower than the interval of the
    problems alone, and seeds that disagree cost 12.7 standard errors if there are two, 4.3 if there are three. Wide, and right.

    Why not a two-level bootstrap: it finds (S - 1) / S of the seed variance, half of it for two seeds, and two or three seeds
    have 3 or 10 different resamples.
    """
    seeds = len(strata[0])
    if seeds < 2 or any(values.shape[1] < 2 for values in strata):
        return None
    by_seed = torch.stack([values.double().mean(1) for values in strata]).mean(0)  # [S]
    v_seeds = float(by_seed.var()) / seeds
    v_problems, v_rest, spread = 0.0, 0.0, 0.0
    for values in strata:
        x, count = values.double(), values.shape[1]
        part = float(x.mean(0).var()) / count / len(strata) ** 2
        rest = x - x.mean(0, keepdim=True) - x.mean(1, keepdim=True) + x.mean()
        v_problems += part
        v_rest += float(rest.square().sum()) / ((seeds - 1) * (count - 1)) / (seeds * count) / len(strata) ** 2
        spread += part**2 / (count - 1)
    if v_problems <= 1e-24:
        return None
    more = max(v_seeds - v_rest, 0.0)
    df = round(v_problems**2 / spread, 6)  # N - 1 for one task, whatever the last bits say
    return Crossed(float(by_seed.mean()), v_problems, df, more, seeds - 1.0, min(v_rest, v_problems))


def _resampled_means(strata: Sequence[Tensor], resamples: int, seed: int) -> Tensor:
    """[resamples] means over strata of the means of problems drawn with replacement within each."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(resamples, dtype=torch.float64)
    for values in strata:
        picks = torch.randint(len(values), (resamples, len(values)), generator=generator)
        total += values.double()[picks].mean(1)
    return total / len(strata)


def _quantiles(means: Tensor, tail: float) -> tuple[float, float]:
    low, high = torch.quantile(means, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high


def _constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())


def _level(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return level


# --- tests -----------------------------------------------------------------------------------------------------------


def sign_flip_p(strata: Sequence[Tensor], *, flips: int = FLIPS, seed: int = 0) -> float:
    """Two-sided permutation p-value of paired differences [N] (one tensor per task, each task with equal weight).

    If the two models were the same, each problem's difference could as well have had the other sign. Problems without a
    difference cannot be flipped and drop out. Exact by enumeration for up to 16 differing problems (for one sample per problem
    that is McNemar's exact test), else Monte Carlo with (b + 1) / (m + 1), which never claims more than m flips can show.
    """
    values = torch.cat([differences.double() / len(differences) for differences in strata])
    values = values[values != 0]
    if len(values) == 0:
        return 1.0
    least = float(values.sum().abs()) - 1e-12 * float(values.abs().sum())  # equal sums may differ in their last bit
    if len(values) <= EXACT_FLIPS:
        bits = torch.arange(2 ** len(values))[:, None] >> torch.arange(len(values)) & 1
        return float(((1.0 - 2.0 * bits.double()) @ values).abs().ge(least).double().mean())
    generator = torch.Generator().manual_seed(seed)
    beyond = 0
    for start in range(0, flips, 1000):  # in parts: 9999 x thousands of problems would be large
        shape = (min(1000, flips - start), len(values))
        signs = 1.0 - 2.0 * torch.randint(2, shape, generator=generator).double()
        beyond += int((signs @ values).abs().ge(least).sum())
    return (beyond + 1) / (flips + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the chance of any false alarm among all of them stays below the level."""
    corrected, worst = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = worst
    return corrected


# --- power: how much data would settle it ----------------------------------------------------------------------------


class SamplingNoise(NamedTuple):
    """How much of the spread of a problem's difference comes from drawing only K samples of each model."""

    variance: float
    """Of one problem's difference of means, averaged over problems; falls as 1 / K."""
    cancelled: float
    """Share of the two models' own sampling noise that is gone because it was shared (matched seeds)."""


def sampling_noise(first: Tensor, second: Tensor) -> SamplingNoise | None:
    """From scores [N, K] of two models. None with fewer than two samples per problem.

    With matched seeds, sample k of both models uses the same random numbers: part of the noise cancels in the difference.
    """
    if min(first.shape[1], second.shape[1]) < 2:
        return None
    apart = sum(float(scores.double().var(1).mean()) / scores.shape[1] for scores in (first, second))
    if first.shape[1] != second.shape[1]:
        return SamplingNoise(apart, 0.0)
    together = float((second.double() - first.double()).var(1).mean()) / first.shape[1]
    return SamplingNoise(together, 1.0 - together / apart if apart > 0 else 0.0)


class Term(NamedTuple):
    """A part of the variance of a mean difference, as something (samples, problems, seeds) grows from `now` to x."""

    fixed: float
    falling: float
    """Falls as now / x."""
    df: Callable[[float], float]
    """Degrees of freedom at x."""


def needed(difference: float, terms: Sequence[Term], now: float, *, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """How large something, `now` today, must be to find `difference` with this power. None: no size is enough.

    A two-sided t test finds a difference of (t_alpha/2 + t_power) standard errors; so the smallest x with

        sum over terms of (t_(1 - alpha/2) + t_power)^2 (fixed + falling * now / x)  <=  difference^2
    """

    def enough(x: float) -> bool:
        total = 0.0
        for term in terms:
            df = max(1.0, term.df(x))
            factor = t_quantile(1.0 - alpha, df) + t_quantile(2.0 * power - 1.0, df)
            total += factor**2 * (max(term.fixed, 0.0) + term.falling * now / x)
        return total <= difference**2

    low, high = 0.0, now
    while not enough(high):
        low, high = high, 2.0 * high
        if high > 1e6 * now:
            return None
    while high - low > 1e-4 * high and high > 1e-3 * now:
        middle = (low + high) / 2.0
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# --- Student's t (scipy is no dependency of ours) --------------------------------------------------------------------


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) of Student's t with `df` > 0 degrees of freedom: the regularised incomplete beta function."""
    inside, outside = t * t / (df + t * t), df / (df + t * t)
    if outside < (df + 2.0) / (df + 5.0):
        return _beta_fraction(outside, df / 2.0, 0.5)
    return 1.0 - _beta_fraction(inside, 0.5, df / 2.0)


@lru_cache(maxsize=4096)
def t_quantile(level: float, df: float) -> float:
    """The t with P(|T| < t) = level."""
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > 1.0 - level:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if t_two_sided(middle, df) > 1.0 - level else (low, middle)
    return (low + high) / 2.0


def _beta_fraction(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction (Lentz), which converges fast for x < (a + 1) / (a + b + 2)."""
    if x <= 0.0:
        return 0.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    result = d
    for m in range(1, 10_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1.0 + factor / c, 1.0 / (1.0 + factor * d)
            result *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * result

"""Units that are independent, and runs that are not: false alarms of "established", simulated for the designs in use."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import scipy.stats
import torch
from torch import Tensor

from iwopd.eval.statistics import ALPHA, LEAST_UNITS, UnitEffect, holm, over_units, t_quantile, t_two_sided

EXPERIMENTS = 4000
SPREADS = (0.0, 1.0, 2.5, 5.0, 10.0)
"""Of lineages, in multiples of the seeds' spread."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def differences(lineages: int, seeds: int, spread: float, *comparisons: int, seed: int = 0) -> Tensor:
    """[experiments, *comparisons, lineages, seeds]: paired differences without a true effect."""
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERIMENTS, *comparisons, lineages)
    return spread * torch.randn(*shape, 1, generator=generator) + torch.randn(*shape, seeds, generator=generator)


def raised(effect: UnitEffect) -> bool:
    return effect.enough and effect.p_value < ALPHA


def test_by_hand_and_by_scipy() -> None:
    means = [1.2, 0.3, -0.4, 2.0, 0.9]
    found = over_units(means)
    theirs = scipy.stats.ttest_1samp(means, 0.0)
    ends = theirs.confidence_interval(0.95)
    assert found.p_value == pytest.approx(theirs.pvalue)
    assert found.interval == pytest.approx((0.8, ends.low, ends.high))
    assert (found.units, found.enough) == (5, True)
    wide = over_units(means, level=0.99).interval
    assert wide.high == pytest.approx(theirs.confidence_interval(0.99).high)


def test_few_units_give_no_verdict() -> None:
    one = over_units([3.0])
    assert (one.interval.mean, one.p_value, one.enough) == (3.0, 1.0, False)
    assert math.isnan(one.interval.low)
    assert not over_units([3.0, 3.1, 3.2]).enough
    assert over_units([3.0, 3.1, 3.2, 3.3]).enough
    assert LEAST_UNITS == 4
    with pytest.raises(ValueError, match="no unit"):
        over_units([])


def test_equal_units() -> None:
    assert over_units([0.0] * 4).p_value == 1.0
    assert over_units([5.0] * 4).interval == pytest.approx((5.0, 5.0, 5.0))


def test_interval_and_p_never_disagree() -> None:
    for means in differences(4, 1, 1.0)[:, :, 0].tolist():
        found = over_units(means)
        assert (found.p_value < ALPHA) == (found.interval.low > 0 or found.interval.high < 0)


@pytest.mark.parametrize(("lineages", "seeds"), [(4, 1), (4, 2), (4, 3), (6, 2)])
@pytest.mark.parametrize("spread", SPREADS)
def test_false_alarms_of_our_designs(lineages: int, seeds: int, spread: float) -> None:
    means = differences(lineages, seeds, spread, seed=lineages * 10 + seeds).mean(-1)
    rate = sum(raised(over_units(one)) for one in means.tolist()) / EXPERIMENTS
    assert 0.03 <= rate <= 0.08


@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_false_alarms_of_a_whole_table(spread: float) -> None:
    """Eight methods against one baseline, whose luck they share: any "established" among them."""
    runs = differences(4, 2, spread, 9)
    means = (runs[:, 1:] - runs[:, :1]).mean(-1)
    rate = sum(min(holm([over_units(row).p_value for row in table])) < ALPHA for table in means.tolist()) / EXPERIMENTS
    assert rate < 0.08


def test_runs_are_no_units() -> None:
    """Why lineages are: with all runs taken as independent, four in ten experiments without an effect find one."""

    def all_runs(values: list[float]) -> bool:
        mean, count = sum(values) / len(values), len(values)
        error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
        return t_two_sided(mean / error, count - 1.0) < ALPHA

    naive = differences(2, 3, 5.0).flatten(1).tolist()
    assert sum(all_runs(one) for one in naive) / EXPERIMENTS >= 0.15
    assert not any(raised(over_units(one)) for one in differences(2, 3, 5.0).mean(-1)[:100].tolist())
    assert t_quantile(0.95, 3.0) == pytest.approx(3.1824, abs=1e-4)  # what four lineages take, in standard errors

"""Intervals over prompts, for whole curves at once."""

from __future__ import annotations

import math

import pytest
import torch

from iwopd.algo.position import Binned
from iwopd.analysis.probe.intervals import Bootstrap, over_batches


def test_the_observed_numbers_are_ratios_of_sums() -> None:
    binned = Binned(torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 4.0]]), torch.tensor([[1, 2], [1, 0], [2, 2]]))
    bootstrap = Bootstrap([0, 1, 1])
    assert bootstrap.mean_curve(binned).mean == [9 / 4, 6 / 4]
    assert bootstrap.share_curve(binned).mean == [9 / 15, 6 / 15]
    curve = bootstrap.mean_curve(binned)
    # Two prompts: a resample is one of them twice, or both.
    assert curve.low[0] == 1.0
    assert curve.high[0] == pytest.approx(8 / 3)


def test_a_bin_that_some_resamples_miss() -> None:
    """Only one prompt in two reaches the second bin: it has a mean, and NaN of the others does no harm."""
    binned = Binned(torch.tensor([[1.0, 7.0], [3.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]))
    curve = Bootstrap([0, 1]).mean_curve(binned)
    assert (curve.mean[1], curve.low[1], curve.high[1]) == (7.0, 7.0, 7.0)
    nobody = Bootstrap([0, 1]).mean_curve(Binned(torch.zeros(2, 1), torch.zeros(2, 1)))
    assert nobody.mean == [None]


def test_an_interval_is_as_wide_as_theory_says() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = Bootstrap(list(range(400)), seed=2).mean(values)
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.low is not None
    assert found.high is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.966 * float(values.std()) / 20, rel=0.08)


def test_rollouts_of_one_prompt_count_as_one() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    single = Bootstrap(list(range(50))).mean(values)
    doubled = Bootstrap([number // 2 for number in range(100)]).mean(values.repeat_interleave(2))
    assert doubled.low == pytest.approx(single.low)
    assert doubled.high == pytest.approx(single.high)


def test_resamples_are_shared_and_seeded() -> None:
    values = torch.arange(20.0)
    bootstrap = Bootstrap(list(range(20)), seed=5)
    nothing = bootstrap.resampled(lambda a, b: a - b, values, values)
    assert not nothing.any()
    assert Bootstrap(list(range(20)), seed=5).mean(values) == bootstrap.mean(values)
    assert Bootstrap(list(range(20)), seed=6).mean(values) != bootstrap.mean(values)


def test_one_prompt_has_no_interval() -> None:
    found = Bootstrap([0, 0]).mean(torch.tensor([1.0, 2.0]))
    assert (found.mean, found.low, found.high) == (1.5, None, None)


def test_prompts_are_numbered_without_gaps() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        Bootstrap([0, 2])


def test_student_t_over_batches() -> None:
    found = over_batches([1.0, math.nan, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high == pytest.approx(2.0 + 4.302653 / math.sqrt(3), rel=1e-5)  # t of two degrees of freedom
    assert found.low == pytest.approx(2.0 - 4.302653 / math.sqrt(3), rel=1e-5)
    assert over_batches([4.0]).low is None
    assert over_batches([math.nan]).mean is None

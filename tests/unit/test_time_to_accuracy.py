"""bench/accuracy_tables.py: arrival at an accuracy, the best learning rate, ratios and their table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

STEPS = 10


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "accuracy_tables.py"
    spec = importlib.util.spec_from_file_location("accuracy_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy_tables"] = module
    spec.loader.exec_module(module)
    return module


def curve(*accuracies: float, seconds: float = 2.0) -> list[dict[str, float]]:
    """An evaluation every fifth step, so many CPU seconds a step."""
    return [
        {"step": 5 * place, "cpu": 5 * place * seconds, "wall": 50.0 * place, "tokens": 1, "accuracy": one}
        for place, one in enumerate(accuracies)
    ]


def test_arrival_is_interpolated_between_evaluations(bench: ModuleType) -> None:
    points = curve(0.2, 0.4, 0.6)
    assert bench.arrival(points, 0.5) == pytest.approx(15.0)
    assert bench.arrival(points, 0.5, "step") == pytest.approx(7.5)
    assert bench.arrival(points, 0.4) == pytest.approx(10.0)
    assert bench.arrival(points, 0.2) == 0.0
    assert bench.arrival(points, 0.61) is None


def test_the_first_arrival_counts_even_if_the_curve_falls_again(bench: ModuleType) -> None:
    assert bench.arrival(curve(0.3, 0.1, 0.5, 0.2, 0.9), 0.4, "step") == pytest.approx(5 + 5 * 0.75)


def test_a_ratio_is_a_bound_where_trl_does_not_arrive(bench: ModuleType) -> None:
    assert bench.ratio(30.0, 40.0, 10.0) == bench.Ratio(3.0)
    assert bench.ratio(None, 40.0, 10.0) == bench.Ratio(4.0, bound=True)
    assert bench.ratio(30.0, 40.0, None) is None
    assert bench.ratio(30.0, 40.0, 0.0) is None  # no division by zero
    mean = bench.overall([bench.Ratio(2.0), bench.Ratio(8.0, bound=True)])
    assert (mean.value, mean.bound) == (pytest.approx(4.0), True)


def test_the_best_rate_brings_most_lineages_there_then_soonest(bench: ModuleType) -> None:
    assert bench.best_rate({2.0: [30.0, 30.0], 4.0: [1.0, None]}) == 2.0
    assert bench.best_rate({2.0: [4.0, 16.0], 4.0: [9.0, 9.0]}) == 2.0  # geometric means 8 and 9
    assert bench.best_rate({2.0: [None], 4.0: [None]}) == 2.0


def test_targets_take_whole_runs_of_opd_only(bench: ModuleType) -> None:
    curves = {
        ("clean", 4, "opd/full", 1.0): curve(0.2, 0.4, 0.5),
        ("clean", 4, "opd/full", 4.0): curve(0.2, 0.9),  # stopped early
        ("clean", 4, "opd/full", 8.0): curve(0.2, 0.4, 0.8),
        ("clean", 4, "kl/full", 8.0): curve(0.2, 0.4, 1.0),
        ("clean", 5, "opd/full", 8.0): curve(0.2, 0.4, 1.0),
    }
    assert bench.targets(curves, "clean", 4, STEPS) == {"default": pytest.approx(0.45), "best": pytest.approx(0.72)}
    assert bench.targets(curves, "clean", 5, STEPS) == {"best": pytest.approx(0.9)}
    assert bench.targets(curves, "clean", 6, STEPS) == {}


def test_the_table_has_each_arm_at_its_best_rate(bench: ModuleType) -> None:
    curves = {
        **{("clean", one, "trl", 4.0): curve(0.2, 0.4, 0.6) for one in (4, 5)},
        **{("clean", one, "trl", 8.0): curve(0.2, 0.3, 0.4) for one in (4, 5)},
        ("clean", 4, "kl/drift", 4.0): curve(0.2, 0.7, seconds=0.5),
        ("clean", 5, "kl/drift", 4.0): curve(0.2, 1.0, seconds=1.0),
        ("clean", 4, "kl/drift", 8.0): curve(0.2, 0.9, seconds=0.5),  # not run in lineage 5
    }
    rows = bench.arm_rows(curves, "clean", [4, 5], {4: 0.4, 5: 0.65})
    assert [(row.arm, row.rate) for row in rows] == [("trl", 4.0), ("kl/drift", 4.0)]
    assert bench.table(rows, [4, 5])[2:] == [
        "| trl | 4 | 10.0 (5) | never | 1.0 (1.0 to 1.0; 1 of 2) |",
        "| kl/drift | 4 | 1.0 (2) | 2.8 (3) | > 8.4 (> 7.1 to 10.0) |",
    ]

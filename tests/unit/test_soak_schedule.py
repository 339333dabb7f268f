"""bench/soak.py: every kind of fault comes in every round, and slopes of memory leave loading out."""

from __future__ import annotations

import importlib.util
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

KINDS = 12


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "soak_schedule.py"
    spec = importlib.util.spec_from_file_location("soak_schedule", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first(bench: ModuleType, faults: int, seed: int) -> list[str]:
    return [kind for kind, _ in islice(bench.schedule(bench.kinds(disk=True), seed), faults)]


def test_the_kinds_cover_both_servers_the_trainer_and_the_disk(bench: ModuleType) -> None:
    kinds = bench.kinds(disk=True)
    assert len(kinds) == len(set(kinds)) == KINDS
    assert {"kill trainer", "full disk", "garbage teacher", "stop rollouts"} <= set(kinds)
    assert set(kinds) - set(bench.kinds(disk=False)) == {"full disk"}


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_met_within_the_first_round_and_again_in_the_next(bench: ModuleType, seed: int) -> None:
    faults = first(bench, 2 * KINDS, seed)
    assert set(faults[:KINDS]) == set(faults[KINDS:]) == set(bench.kinds(disk=True))


def test_half_an_hour_with_a_fault_a_minute_sees_every_kind_twice(bench: ModuleType) -> None:
    assert min(Counter(first(bench, 25, 0)).values()) == 2


def test_the_order_comes_from_the_seed_and_differs_between_rounds(bench: ModuleType) -> None:
    assert first(bench, 24, 3) == first(bench, 24, 3) != first(bench, 24, 4)
    faults = first(bench, 24, 3)
    assert faults[:KINDS] != faults[KINDS:]


def test_lengths_stay_near_the_usual_one(bench: ModuleType) -> None:
    lengths = [length for _, length in islice(bench.schedule(["kill trainer"], 0), 200)]
    assert 0.5 <= min(lengths) < 0.6
    assert 1.4 < max(lengths) <= 1.5


def test_nothing_to_draw_from_is_refused(bench: ModuleType) -> None:
    with pytest.raises(ValueError, match="no kind of fault"):
        next(bench.schedule([], 0))


def test_loading_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process loads for minutes; what it holds afterwards is what counts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import soak

    loads = [(second, min(400.0, 2.0 * second)) for second in range(0, 900, 5)]
    grows = [(second, 400.0 + second / 60) for second in range(0, 900, 5)]
    brief = [(second, 400.0) for second in range(0, 50, 5)]
    samples = {("trainer", 1): loads, ("trainer", 2): brief, ("teacher", 3): grows, ("rollouts", 4): brief}
    told = list(soak.Memory({key: [(float(when), size) for when, size in points] for key, points in samples.items()}).slopes())
    assert told == [
        "rollouts: no process lived long enough for a slope",
        "teacher: +60.0 MB an hour over its last 7 minutes, at 411 MB",
        "trainer: +0.0 MB an hour over its last 7 minutes, at 400 MB",
    ]

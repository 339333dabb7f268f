"""bench/stragglers.py: lengths as they were measured, the two ways to spread drifts, and the wait for the last engine."""

from __future__ import annotations

import importlib.util
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from iwopd.cluster.plan.public_models import public_config
from iwopd.train.memory import ModelShape


@pytest.fixture(scope="module")
def bench() -> Any:
    path = Path(__file__).parents[2] / "bench" / "stragglers.py"
    spec = importlib.util.spec_from_file_location("stragglers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lengths_have_the_measured_quantiles(bench: Any) -> None:
    dice = random.Random(0)
    drawn = sorted(bench.drawn_length(dice, "chat") for _ in range(20000))
    for level in (0.25, 0.5, 0.9):
        wanted = bench.LENGTHS["chat"][bench.LEVELS.index(level)]
        assert drawn[int(level * len(drawn))] == pytest.approx(wanted, rel=0.06)
    assert drawn[-1] <= bench.LIMIT["chat"]
    longest = max(bench.drawn_length(dice, "reasoning") for _ in range(5000))
    assert longest == bench.LIMIT["reasoning"]  # 3 % were longer, and are cut off
    assert all(list(values) == sorted(values) and len(values) == len(bench.LEVELS) for values in bench.LENGTHS.values())


def test_both_spreads_write_the_same_share(bench: Any) -> None:
    shares = [0.1, 0.2, 0.6]
    dice, lengths = random.Random(1), random.Random(2)
    whole = [bench.drawn_length(lengths, "reasoning") for _ in range(20000)]
    for stop in (bench.by_share(shares), bench.by_rate(shares, "reasoning", seed=0)):
        written = [stop(dice, length) for length in whole]
        assert sum(written) / sum(whole) == pytest.approx(statistics.mean(shares), rel=0.05)
        assert all(1 <= after <= before for after, before in zip(written, whole, strict=True))


def test_a_step_waits_for_its_longest_answer(bench: Any) -> None:
    model = ModelShape.of(public_config(bench.MODEL))
    few = bench.stage(model, 4, 4, "chat", bench.to_the_end, 0)
    assert few == bench.stage(model, 4, 4, "chat", bench.to_the_end, 0)  # seeded
    many = bench.stage(model, 64, 4, "chat", bench.to_the_end, 0)
    assert many[0] > few[0]
    assert many[1] > few[1]
    alike = bench.stage(model, 16, 4, "chat", lambda dice, length: 100, 0)
    assert alike[1] == pytest.approx(0)
    cut = bench.stage(model, 64, 4, "chat", bench.at_quantile("chat", 0.9), 0)
    assert cut[0] < many[0]
    assert cut[2] > 0.8 * many[2]

"""`bench/real_accuracy.py` at a toy scale: a small random model instead of SmolLM2, the same code from problems to summary."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from models import byte_tokenizer, make_model

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    try:
        import real_accuracy

        yield real_accuracy
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_model("llama", layers=4, vocab=258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def plan(bench: ModuleType, out: Path, **change: Any) -> Any:
    small = {"seeds": 2, "steps": 2, "every": 1, "prompts": 4, "held_out": 6, "operands": 2, "largest": 9, "dropped": 1}
    return bench.Plan(out, **{**small, "teacher_steps": 2, "student_steps": 2, "max_tokens": 24, **change})


def test_sums_are_written_out(bench: ModuleType) -> None:
    assert bench.question((12, 7, 15)) == "12 + 7 + 15 ="
    assert bench.solution((12, 7, 15)) == r"12 + 7 = 19; 19 + 15 = 34; \boxed{34}"
    slips = iter([1, 0])
    assert bench.solution((12, 7, 15), lambda: next(slips)) == r"12 + 7 = 20; 20 + 15 = 35; \boxed{35}"  # carried on


def test_nothing_held_out_is_trained_on(bench: ModuleType, tmp_path: Path) -> None:
    held_out, others = bench.problems(plan(bench, tmp_path))
    assert len(held_out) == 6
    assert len(others) == 81 - 6
    assert not set(held_out) & set(others)
    whole = plan(bench, tmp_path, operands=3, largest=20)
    asked = {text for text, _ in islice(bench.answers_of(whole, 0, 0.3), 3000)}
    assert asked.isdisjoint({bench.question(one) for one in bench.problems(whole)[0]})


def test_students_see_slips_and_teachers_none(bench: ModuleType, tmp_path: Path) -> None:
    small = plan(bench, tmp_path)
    right = {bench.question(one): bench.solution(one) for one in bench.problems(small)[1]}
    wrong = {c: sum(right[q] != a for q, a in islice(bench.answers_of(small, 0, c), 1000)) for c in (0.0, 0.3)}
    assert wrong[0.0] == 0
    assert 240 < wrong[0.3] < 360
    slip = bench.noisy(random.Random(0), 1.0)
    assert {slip() for _ in range(50)} == {-2, -1, 1, 2}


def test_dropped_layers(bench: ModuleType) -> None:
    found = bench.dropped_layers(30, 10)
    assert len(set(found)) == 10
    assert (min(found), max(found)) == (2, 27)
    with pytest.raises(ValueError, match="the first and the last stay"):
        bench.dropped_layers(4, 3)


def test_fine_tuning_learns_the_format(bench: ModuleType, tmp_path: Path) -> None:
    model = make_model("llama", vocab=258)
    tokenizer = byte_tokenizer()
    answers = bench.answers_of(plan(bench, tmp_path), 0, 0.0)
    losses = bench.fine_tune(model, tokenizer, answers, steps=20, batch=4, lr=1e-2)
    assert losses[-1] < 0.6 * losses[0]


def test_from_the_base_to_the_summary(bench: ModuleType, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RUNS", ("opd", "kl-gated"))
    small, console = plan(bench, tmp_path / "out"), Console(quiet=True)
    how = {"at_a_time": 2, "console": console}
    assert bench.measure(small, base, minutes=0.0, **how)["methods"]["opd"]["by_seed"] == {}  # the time is up at once
    one = plan(bench, tmp_path / "out", seeds=1)
    result = bench.measure(one, base, minutes=60.0, **how)
    assert sorted(result["methods"]["kl-gated"]["by_seed"][0]) == [0, 1, 2]
    assert result["methods"]["opd"]["mean"][2][1] is None  # one seed has no interval
    assert set(result["teacher"]) == {0}
    student = json.loads((small.out / "seed-0" / "student" / "config.json").read_text())
    assert student["num_hidden_layers"] == 3
    stamps = {path: path.stat().st_mtime_ns for path in small.out.glob("seed-0/**/*") if path.is_file()}
    assert bench.measure(one, base, minutes=60.0, **how) == result  # finished: nothing is made again
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_the_summary_pairs_seeds(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {"opd": (20.0, 40.0, 20.0, 40.0), "survival": (25.0, 47.0, 25.0, 47.0), "kl-gated": (30.0, 50.0)}
    curves = {name: {seed: {0: 10.0, 2: value} for seed, value in enumerate(found)} for name, found in reached.items()}
    monkeypatch.setattr(bench, "_curves", lambda plan, method: curves.get(method, {}).items())
    result = bench.summary(plan(bench, tmp_path))
    assert "the seed" in result["unit"]
    half = 3.182446 * math.sqrt(4 / 3) / 2  # t of three degrees, of 5, 7, 5, 7
    assert result["methods"]["survival"]["minus_opd"][2] == [6.0, *(pytest.approx(6 + x, abs=0.01) for x in (-half, half))]
    assert result["methods"]["kl-gated"]["minus_opd"][2] == [10.0, None, None]  # two seeds are too few for an interval
    assert result["methods"]["iw-opd"]["mean"] == {}
    shown = bench.table(result)
    assert "| Survival (ours) | 4 | 10.0 (10.0 to 10.0) | 36.0 " in shown
    assert "+6.0 (+4.2 to +7.8) |" in shown

"""The demo as a stranger runs it: a fresh cache, real pretraining, real runs. Takes minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from iwopd.runs.directory import RunDirectory
from waiting import PATIENCE


def demo(*words: str | Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "IWOPD_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "iwopd", "demo", *(str(word) for word in words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    done = demo("--json", "--methods", "opd,iw-opd,suffix-30", "--out", folder / "runs", cache=folder / "cache")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, folder


@pytest.mark.slow
def test_the_demo_shows_the_position_bias(shown: tuple[dict[str, Any], str, Path]) -> None:
    numbers, _, _ = shown
    base, teacher = numbers["base_accuracy"], numbers["teacher_accuracy"]
    last = {name: steps["40"] for name, steps in numbers["methods"].items()}
    assert 10 <= base <= 40
    assert teacher >= base + 45
    assert last["opd"]["low"] > base + 10
    assert last["suffix-30"]["low"] <= base + 3
    assert numbers["handoff"]["0"] - numbers["handoff"]["0.9"] >= 40
    assert list(numbers["handoff"]) == ["0", *(f"0.{tenth}" for tenth in range(1, 10))]
    for steps in numbers["methods"].values():
        assert set(steps) == {"10", "20", "30", "40"}
        for interval in steps.values():
            assert interval["low"] <= interval["mean"] <= interval["high"]


@pytest.mark.slow
def test_it_prints_what_a_reader_needs(shown: tuple[dict[str, Any], str, Path]) -> None:
    numbers, text, _ = shown
    for words in ("training the world's models", "Base (student before)", "IW-OPD", "Teacher", "the student alone"):
        assert words in text
    assert "What this shows, and what it does not" in text
    assert "weights: 1.50 at the first token, 1.00 at the last" in text
    for folder in numbers["runs"]:
        run = RunDirectory(Path(folder))
        assert len(list(run.read("metrics.jsonl"))) == 40
        kept = list(run.read("rollouts.jsonl"))
        assert len(kept) == 5 * 8
        for record in kept:
            assert len(record["tokens"]) == len(record["gap"]) == len(record["weights"]) == len(record["token_ids"])


@pytest.mark.slow
def test_a_folder_that_is_not_a_demos_is_left_alone(shown: tuple[dict[str, Any], str, Path]) -> None:
    folder = shown[2]
    precious = folder / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    done = demo("--out", precious, cache=folder / "cache")
    assert done.returncode == 2
    assert "holds something that is not a demo's" in done.stderr
    assert (precious / "thesis.tex").exists()

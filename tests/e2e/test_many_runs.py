"""Many runs in real processes: made once, resumed after a kill, and a failure says why."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from iwopd.config import make_config
from iwopd.runs.directory import RunDirectory
from iwopd.train.many import ManyRunsError, PlannedRun, _start, run_all
from models import save_pair
from waiting import wait_until


def planned(folder: Path, settings: dict[str, Any], count: int) -> list[PlannedRun]:
    settings = {**settings, "eval": {"prompts": 0}, "tracking": {"console": "off"}}
    return [PlannedRun(f"seed {seed}", folder / str(seed), make_config({**settings, "seed": seed})) for seed in range(count)]


def test_runs_are_resumed_and_made_once(tmp_path: Path) -> None:
    screen = Console(file=io.StringIO())
    many = planned(tmp_path / "runs", {**save_pair(tmp_path), "steps": 30}, 2)
    begun: subprocess.Popen[bytes] = _start(many[0])
    wait_until(lambda: list((many[0].folder / "checkpoints").glob("step-*")), "a checkpoint")
    begun.kill()
    begun.wait()
    assert not many[0].finished
    run_all(many, at_a_time=2, console=screen)
    assert all(job.finished for job in many)
    for job in many:
        assert [record["step"] for record in RunDirectory(job.folder).read("metrics.jsonl")] == list(range(1, 31))
    before = [(job.folder / "metrics.jsonl").stat().st_mtime_ns for job in many]
    run_all(many, at_a_time=2, console=screen)
    assert before == [(job.folder / "metrics.jsonl").stat().st_mtime_ns for job in many]
    assert "2 of 2 runs are there already" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    settings = save_pair(tmp_path)
    settings["data"] = {"prompts": str(tmp_path / "nowhere.jsonl")}
    with pytest.raises(ManyRunsError, match=r"(?s)failed with exit code 2:\n.*cannot read prompts from .*nowhere\.jsonl"):
        run_all(planned(tmp_path / "runs", settings, 1), at_a_time=1, console=Console(file=io.StringIO()))

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from iwopd.config import ConfigError, make_config
from iwopd.eval.runner import Evaluation
from iwopd.eval.task import Verdict
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.trackers import check_trackers, open_tracker
from iwopd.train.tracking import Tracker
from iwopd.types import EvalResult, StepStats
from waiting import PATIENCE

METRICS: dict[str, Any] = {
    "kl/sampled": 0.5,
    "gap/abs_mean": 0.7,
    "weights/mean": 1.2,
    "weights/min": 1.0,
    "weights/max": 1.5,
    "rollout/length_mean": 20.0,
    "rollout/truncated": 0.25,
    "position/abs_gap": [1.0, float("nan")],
}
SECONDS = {"rollout": 1.0, "teacher": 0.5, "signal": 0.0, "update": 0.5}


def follow(tmp_path: Path, console: str, terminal: bool, trackers: list[str] | None = None) -> str:
    config = make_config(
        {"models": {"world": "clean"}, "steps": 3, "tracking": {"console": console, "trackers": trackers or []}}
    )
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data")
    tracker = Tracker(config, run, console=screen)
    scores = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    result = EvalResult("tiny", ("a", "b"), scores, step=0)
    tracker.evaluation(Evaluation(result, [], [], [Verdict("correct", 1.0), Verdict("wrong", 0.0)]), 0.1)
    tracker.step(StepStats(1, 0.25, 2.0, 320, 16, False, SECONDS, METRICS))
    tracker.step(StepStats(2, float("nan"), float("inf"), 320, 16, True, SECONDS, METRICS))
    tracker.say("a message with [brackets] and " + "a long tail " * 20)
    tracker.close()
    return str(screen.file.getvalue())  # type: ignore[attr-defined]


def test_a_line_a_step_when_it_is_not_a_terminal(tmp_path: Path) -> None:
    text = follow(tmp_path, "auto", terminal=False)
    assert "step 0/3  tiny 50.0 %" in text
    assert "step 1/3  loss +0.2500  kl 0.500" in text
    assert "160 tok/s" in text
    assert "UPDATE SKIPPED" in text
    assert "[brackets] and a long tail a long" in text
    assert "\x1b" not in text


def test_a_live_table_on_a_terminal(tmp_path: Path) -> None:
    text = follow(tmp_path, "auto", terminal=True)
    assert "\x1b" in text
    assert "2/3" in text
    assert "25% cut off" in text
    assert "step 0: 50.0 %" in text


def test_off_is_silent_but_the_log_is_written(tmp_path: Path) -> None:
    assert follow(tmp_path, "off", terminal=True) == ""
    records = list(RunDirectory(tmp_path / "run").read("metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2]
    assert records[1]["loss"] is None  # JSON has no NaN
    assert records[0]["position/abs_gap"] == [1.0, None]
    assert records[0]["throughput/tokens_per_second"] == 160.0
    (evaluation,) = RunDirectory(tmp_path / "run").read("evals.jsonl")
    assert evaluation["scores"] == [[1.0], [0.0]]


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(tmp_path, "off", terminal=False, trackers=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("kl/sampled")] == [0.5, 0.5]
    assert [event.value for event in events.Scalars("eval/tiny")] == [0.5]


def test_tensorboard_does_not_repeat_steps_after_a_kill(tmp_path: Path) -> None:
    """A process that logs to step 7 is killed; the run goes on after its checkpoint of step 4."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code = "import os, sys; from pathlib import Path; from iwopd.trackers import open_tracker; "
    code += "tracker = open_tracker('tensorboard', Path(sys.argv[1]), 'p', {}, None); "
    code += "[tracker.log(step, {'loss': step}) for step in range(8)]; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    time.sleep(1.1)  # files are read in the order of their seconds
    tracker = open_tracker("tensorboard", tmp_path, "p", {}, 4)
    for step in range(5, 10):
        tracker.log(step, {"loss": step + 100})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(10))  # nothing twice, and nothing lost
    assert [event.value for event in events.Scalars("loss")] == [0, 1, 2, 3, 4, 105, 106, 107, 108, 109]


def test_wandb_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, offline: what it would upload lies in the run directory."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    follow(tmp_path, "off", terminal=False, trackers=["wandb"])
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    end = time.monotonic() + PATIENCE  # its own process writes, and not all at once
    while not (b"kl/sampled" in (content := log.read_bytes()) and b"eval/tiny" in content):
        assert time.monotonic() < end, content[:200]
        time.sleep(0.1)


def test_trackio_gets_the_numbers(tmp_path: Path) -> None:
    """The real library, in a process of its own: it reads its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path; "
    code += f"import test_tracking; test_tracking.follow(Path({str(tmp_path)!r}), 'off', False, ['trackio'])"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRACKIO_DIR": str(tmp_path / "kept")})
    with sqlite3.connect(tmp_path / "kept" / "iwopd.db") as database:
        rows = [json.loads(row[0]) for row in database.execute("select metrics from metrics order by step")]
    assert [row["kl/sampled"] for row in rows if "kl/sampled" in row] == [0.5, 0.5]
    assert [row["eval/tiny"] for row in rows if "eval/tiny" in row] == [0.5]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"the tracker 'wandb' is not installed .*pip install 'iwopd\[wandb\]'"):
        follow(tmp_path, "off", terminal=False, trackers=["wandb"])
    with pytest.raises(ConfigError, match=r"the tracker 'wandb' is not installed"):
        check_trackers(["tensorboard", "wandb"])  # before anything is loaded or made


def test_run_directories_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(RunError, match="is not a run directory"):
        run.about()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        run.about()
    (tmp_path / "run.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="has format 99, this version of iwopd reads format 1"):
        run.about()


def test_a_line_that_was_cut_off_is_left_out_and_rewind_drops_later_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        run.append("metrics.jsonl", {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in run.read("metrics.jsonl")] == [1, 2, 3]
    run.rewind(2, pytest.fail)
    assert [record["step"] for record in run.read("metrics.jsonl")] == [1, 2]

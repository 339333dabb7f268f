"""`iwopd runs`: every state that a directory can be in, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from iwopd.cli import main
from iwopd.config import make_config
from iwopd.runs.directory import RunDirectory
from iwopd.runs.listing import describe, find_runs

STEPS = 3


def make(folder: Path, steps: int = STEPS) -> RunDirectory:
    run = RunDirectory(folder)
    run.create(make_config({"models": {"world": "clean"}, "steps": STEPS, "method": {"weights": "cumulative-share"}}), "data")
    evaluate(run, 0, 0.0)
    for step in range(1, steps + 1):
        run.append("metrics.jsonl", {"step": step, "rollouts": 4, "rollout/truncated": 1.0, "rollout/length_mean": 9})
    if steps == STEPS:
        evaluate(run, steps, 1.0)
    return run


def evaluate(run: RunDirectory, step: int, score: float) -> None:
    run.append("evals.jsonl", {"step": step, "task": "tiny", "problem_ids": ["a", "b"], "scores": [[score], [score]]})


def test_finished_and_stopped(tmp_path: Path) -> None:
    make(tmp_path / "done")
    done = describe(tmp_path / "done")
    assert (done.state, done.step, done.steps, done.method, done.student) == ("finished", 3, 3, "IW-OPD", "clean world")
    assert [(one.task, one.step, one.before, one.mean) for one in done.scores] == [("tiny", 3, 0.0, 1.0)]
    assert done.alerts == ("Truncation",)
    make(tmp_path / "part", 1)
    assert describe(tmp_path / "part").state == "stopped"
    (tmp_path / "done" / "evals.jsonl").write_text((tmp_path / "part" / "evals.jsonl").read_text())
    assert describe(tmp_path / "done").state == "stopped"  # the last step was taken, but not evaluated


def test_running_and_killed(tmp_path: Path) -> None:
    make(tmp_path / "run", 1)
    code = "import sys; from pathlib import Path; from iwopd.runs.owner import owned\n"
    code += "with owned(Path(sys.argv[1]), print): print('mine', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = describe(tmp_path / "run")
        assert (found.state, found.detail) == ("running", f"process {process.pid} on {os.uname().nodename}")
        process.kill()
    found = describe(tmp_path / "run")
    assert found.state == "killed"
    assert str(process.pid) in found.detail


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("run.json", "{", "run.json is damaged"),
        ("run.json", None, "is not a run directory"),
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", "steps = [", "cannot be read"),
        ("metrics.jsonl", "{}\n", "line 1 is damaged"),
        ("evals.jsonl", '{"step": 1, "task": "tiny"}\n', "problem_ids"),
    ],
)
def test_damage_is_a_state_with_a_reason(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    make(tmp_path / "run")
    if content is None:
        (tmp_path / "run" / file).unlink()
    else:
        (tmp_path / "run" / file).write_text(content)
    found = describe(tmp_path / "run")
    assert found.state == "damaged"
    assert words in found.detail


def test_runs_are_found_below_a_folder_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "demo" / "a")
    make(tmp_path / "b", 1)
    (tmp_path / "c").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("not a run")
    assert [path.name for path in find_runs(tmp_path)] == ["b", "c", "a"]
    with pytest.raises(SystemExit) as ended:
        main(["runs", str(tmp_path)])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["stopped", "empty", "finished"]
    assert "tiny 0.0 → 100.0 % (step 3)" in lines[3]
    with pytest.raises(SystemExit):
        main(["runs", "--json", str(tmp_path / "demo")])
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["state"], record["scores"]["tiny"]["mean"], record["alerts"]) == ("finished", 1.0, ["Truncation"])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["runs", str(tmp_path / "nowhere")])
    assert ended.value.code == 2
    assert "nowhere does not exist: name a folder of runs" in capsys.readouterr().err

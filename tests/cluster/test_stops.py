"""SIGTERM saves the newest finished step, and a resumed run takes the steps of one that was never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster_support import Job, assert_same_steps, lines, steps, train

START_SECONDS = 600
STOP_SECONDS = 120
NO_CHECKPOINTS = ("--checkpoint.every", "100")
"""All that is saved is saved because of the signal."""


def driver(job: Job) -> int:
    """The process of verl's main program."""
    (pid,) = [pid for pid in job.pids() if b"iwopd.cluster.verl.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


@pytest.mark.parametrize("target", ["launcher", "driver"])
def test_sigterm_saves_the_newest_step(whole_run: Path, tmp_path: Path, target: str) -> None:
    run = tmp_path / "run"
    with train(tmp_path, "run", *NO_CHECKPOINTS) as job:
        job.wait_for(lambda: len(steps(run)) >= 2, START_SECONDS)
        os.kill(job.process.pid if target == "launcher" else driver(job), signal.SIGTERM)
        assert job.finish(STOP_SECONDS) == 143
        assert job.pids() == []
        said = job.text()
    done = len(steps(run))
    assert done in (2, 3)  # the update of the third step may have begun
    assert f"stopped by SIGTERM after step {done}. The newest checkpoint is of step {done}" in said
    with train(tmp_path, "run", "--resume", *NO_CHECKPOINTS) as job:
        assert job.finish(START_SECONDS) == 0, job.text()[-3000:]
        assert f"after step {done}" in job.text()
    assert_same_steps(run, whole_run)


def test_ctrl_c_during_an_evaluation(tmp_path: Path) -> None:
    """It is left, the finished step is logged and saved, and the resumed run evaluates it first."""
    run = tmp_path / "run"
    evaluation = ("--eval.every", "1", "--eval.prompts", "150")  # seconds of sampling
    latest = run / "verl" / "checkpoints" / "latest_checkpointed_iteration.txt"
    with train(tmp_path, "run", *evaluation, steps=2) as job:
        job.wait_for(latest.exists, START_SECONDS)  # verl saves, then evaluates
        job.process.send_signal(signal.SIGINT)
        assert job.finish(STOP_SECONDS) == 130
        assert "stopped by SIGINT after step 1. The newest checkpoint is of step 1" in job.text()
    assert [step["step"] for step in steps(run)] == [1]
    assert [record["step"] for record in lines(run / "evals.jsonl")] == [0]
    with train(tmp_path, "run", "--resume", *evaluation, steps=2) as job:
        assert job.finish(START_SECONDS) == 0, job.text()[-3000:]
    assert [step["step"] for step in steps(run)] == [1, 2]
    assert [record["step"] for record in lines(run / "evals.jsonl")] == [0, 1, 2]

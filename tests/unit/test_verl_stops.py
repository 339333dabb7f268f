"""SIGTERM and Ctrl-C: the job is asked to save and end, a second signal ends it. Real jobs: tests/cluster/test_stops.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from iwopd.cluster.verl import launch, stops
from iwopd.cluster.verl.evaluation import Validations
from iwopd.cluster.verl.job import VerlJob
from iwopd.cluster.verl.stops import Received, StopFile, received_signals
from iwopd.cluster.verl.translate import places
from iwopd.config import Config, make_config
from iwopd.runs.directory import RunDirectory
from iwopd.train.state import TrainingStoppedError
from iwopd.train.tracking import Tracker
from waiting import PATIENCE

SIGNALS = [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")]
BEGIN = "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\n(folder / 'metrics-001.jsonl').touch()\n"
ASKED = "while not (folder / 'stop-001.txt').read_text():\n    time.sleep(0.05)\n"
SAVED = "print('saved', (folder / 'stop-001.txt').read_text()); sys.exit(143)"


def _config() -> Config:
    tables = {"models": {"world": "clean"}, "cluster": {"gpus_per_node": 2}, "eval": {"prompts": 0}}
    return make_config({**tables, "tracking": {"console": "off"}})


def _follow(tmp_path: Path, program: str, received: Received, meanwhile: Callable[[Path], None] = lambda _: None) -> None:
    """The launcher follows a job that is this program; `meanwhile` gets the folder of the job."""
    config = _config()
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data", engine="verl")
    where = places(config, run.path)
    where.folder.mkdir()
    StopFile(where.metrics).clear()
    log = where.folder / "log-001.txt"
    job = VerlJob(["-c", program, str(where.folder)], {}, log)
    tracker = Tracker(config, run)
    try:
        meanwhile(where.folder)
        launch._follow(config, run, where, job, tracker, Validations([], tmp_path), received, 0)
    finally:
        tracker.close()
        assert job.process.returncode is not None


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _training(folder: Path) -> None:
    _wait((folder / "metrics-001.jsonl").exists)


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_a_signal_asks_the_job_to_save(tmp_path: Path, number: int, name: str) -> None:
    """The launcher waits for it, and ends with the signal's own code."""
    with received_signals() as received:
        os.kill(os.getpid(), number)
        with pytest.raises(TrainingStoppedError, match=f"stopped by {name}") as caught:
            _follow(tmp_path, BEGIN + ASKED + SAVED, received, _training)
    assert caught.value.exit_code == 128 + number
    assert (tmp_path / "run" / "verl" / "log-001.txt").read_text() == f"saved {name}\n"


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "ECHO_SECONDS", 0.0)
    with received_signals() as received:
        os.kill(os.getpid(), number)
        _wait(lambda: received.first is not None)
        os.kill(os.getpid(), number)
        with pytest.raises(TrainingStoppedError, match=f"stopped by {name}") as caught:
            _follow(tmp_path, BEGIN + "time.sleep(600)", received, _training)
    assert caught.value.exit_code == 128 + number


def test_before_training_there_is_nothing_to_save(tmp_path: Path) -> None:
    received = Received()
    received.note(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match=r"stopped by SIGTERM after step 0\. No checkpoint") as caught:
        _follow(tmp_path, "import time; time.sleep(600)", received)
    assert caught.value.exit_code == 143


def test_a_save_that_fails_is_told(tmp_path: Path) -> None:
    received = Received()
    received.note(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match="no room") as caught:
        _follow(tmp_path, BEGIN + ASKED + "raise OSError('no room')", received, _training)
    assert caught.value.exit_code == 1


def test_a_job_that_was_stopped_by_others(tmp_path: Path) -> None:
    """SIGTERM to the driver alone."""
    with pytest.raises(TrainingStoppedError, match="stopped by SIGTERM") as caught:
        _follow(tmp_path, "import sys; sys.exit(143)", Received())
    assert caught.value.exit_code == 143


def test_the_echo_of_a_signal_is_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` and Slurm signal a process and its group; a second Ctrl-C is always meant."""
    echo, second, interrupts = Received(), Received(), Received()
    monkeypatch.setattr(stops, "ECHO_SECONDS", PATIENCE)
    for _ in range(3):
        echo.note(signal.SIGTERM)
    monkeypatch.setattr(stops, "ECHO_SECONDS", -1.0)
    for _ in range(2):
        second.note(signal.SIGTERM)
    monkeypatch.setattr(stops, "ECHO_SECONDS", PATIENCE)
    for _ in range(2):
        interrupts.note(signal.SIGINT)
    assert [echo.again, second.again, interrupts.again] == [False, True, True]


DRIVER = """
import sys, time
from pathlib import Path
from iwopd.cluster.verl import stops
stops.ECHO_SECONDS = 0.0
stops.listen(stops.StopFile(Path(sys.argv[1])))
print("listening", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("training", [True, False])
def test_the_driver(tmp_path: Path, training: bool) -> None:
    """Its first SIGTERM asks the trainer, the second ends it; before training already the first."""
    metrics = tmp_path / "metrics-001.jsonl"
    stop = StopFile(metrics)
    stop.clear()
    if training:
        metrics.touch()
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(metrics)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "listening\n"
        driver.terminate()
        if training:
            _wait(lambda: stop.asked() == "SIGTERM")
            assert driver.poll() is None
            driver.terminate()
        assert driver.wait(PATIENCE) == 143
    assert stop.asked() == ("SIGTERM" if training else "")

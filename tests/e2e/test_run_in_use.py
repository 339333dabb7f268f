"""A run that is being trained is nobody else's; one that was killed is anybody's, whatever lies in its logs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from iwopd.cli import main
from iwopd.config import make_config
from iwopd.models import load_model
from iwopd.runs.logs import RunError
from iwopd.train import run as training
from iwopd.train.doctor import DoctorError
from iwopd.train.doctor.findings import Finding, failure
from iwopd.train.run import run_training
from models import save_pair
from rollout_server import RolloutServer, serving

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**save_pair(tmp_path_factory.mktemp("pair")), "steps": 100_000}


def test_a_run_that_is_being_trained_is_refused_and_one_that_was_killed_goes_on(
    tmp_path: Path, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(tomli_w.dumps(settings))
    words = ["train", str(recipe), "--out", str(folder), "--no-doctor"]
    process = subprocess.Popen(
        [sys.executable, "-m", "iwopd", *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not list(folder.glob("checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        for more in (["--resume"], []):
            with pytest.raises(SystemExit) as ended:
                main([*words, *more])
            assert ended.value.code == 2
            said = capfd.readouterr().err
            assert f"is in use by process {process.pid} on {socket.gethostname()} (since 20" in said
            assert "Traceback" not in said
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    log = folder / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    steps = [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]
    assert steps == list(range(1, len(steps) + 1))
    log.write_bytes(b"".join([b"\xff\n", b'{"step": 1, "loss": 1' + b"0" * 400 + b"}\n", *lines]))
    last = max(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*")) + 1
    config = make_config({**settings, "steps": last})
    assert run_training(config, folder, resume=True, doctor=False).step == last
    assert [json.loads(line)["step"] for line in log.read_bytes().splitlines()] == list(range(1, last + 1))
    assert len((folder / "metrics.jsonl.damaged").read_bytes().splitlines()) == 2
    assert "damaged lines (line 1, 2) were moved to metrics.jsonl.damaged" in capfd.readouterr().err
    assert not (folder / "owner.lock").exists()


def test_what_the_doctor_refuses_leaves_no_directory(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwell(*_: Any, **__: Any) -> Iterator[Finding]:
        yield failure("echo", "the teacher scores something else", "correct it")

    monkeypatch.setattr(training, "examine_models", unwell)
    tracked = {**settings, "tracking": {"console": "off", "trackers": ["tensorboard"]}}
    with pytest.raises(DoctorError):
        run_training(make_config(tracked), tmp_path / "runs" / "one")
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_the_same_name_that_came_first_is_left_alone(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the name free; the other one was faster with its models."""
    config, folder = make_config(settings), tmp_path / "run"

    def meanwhile(*_: Any, **__: Any) -> Iterator[Finding]:
        folder.mkdir()
        (folder / "run.json").write_text("the other's")
        yield from ()

    monkeypatch.setattr(training, "head_findings", meanwhile)
    with pytest.raises(RunError, match="holds a run already"):
        run_training(config, folder, doctor=False)
    assert (folder / "run.json").read_text() == "the other's"
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]


HOLD = """
import sys, time
from pathlib import Path
from iwopd.runs.owner import owned
with owned(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(3600)
"""


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Another process owns the folder."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command says that ends with exit code 2."""

    def run(*words: str | Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code == 2
        said = capfd.readouterr().err
        assert "Traceback" not in said
        return said

    return run


def test_an_evaluation_has_one_owner(tmp_path: Path, settings: dict[str, Any], refused: Callable[..., str]) -> None:
    folder, words = tmp_path / "eval", ["--model", settings["models"]["student"], "--tasks", "tiny", "--limit", "2"]
    with held(folder) as process:
        said = refused("eval", *words, "--out", folder)
    assert f"{folder} is in use by process {process} on {socket.gethostname()}" in said
    assert [path.name for path in folder.iterdir()] == ["owner.lock"]
    with pytest.raises(SystemExit, match="0"):
        main(["eval", *map(str, words), "--out", str(folder)])
    assert sorted(path.name for path in folder.iterdir()) == ["eval.json", "samples-tiny.jsonl"]


def test_a_probe_has_one_owner(tmp_path: Path, settings: dict[str, Any], refused: Callable[..., str]) -> None:
    pair = [f"--{name}={settings['models'][name]}" for name in ("student", "teacher")]
    with held(tmp_path / "probe.json.parts") as process:
        said = refused(
            "probe", *pair, "--prompts", settings["data"]["prompts"], "--max-tokens", "8", "-o", tmp_path / "probe.json"
        )
    assert f"is in use by process {process} on" in said
    assert "name another result with -o" in said


def test_two_runs_do_not_send_weights_through_one_folder(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Each would write rollouts with the other's weights."""
    exchange = tmp_path / "weights"
    with serving(RolloutServer(load_model(settings["models"]["student"]).eval())) as url:
        engine = {"engine": {"server": {"url": url, "weights_folder": str(exchange)}}}
        rollout = {"rollout": {**settings["rollout"], "engine": "server"}}
        config = make_config({**settings, **engine, **rollout, "steps": 1})
        with held(exchange) as process, pytest.raises(RunError) as error:
            run_training(config, tmp_path / "run", doctor=False)
        assert f"{exchange} is in use by process {process} on" in str(error.value)
        assert "set engine.server.weights_folder to another one" in str(error.value)
        assert not (tmp_path / "run").exists()
        assert run_training(config, tmp_path / "run", doctor=False).step == 1
        assert not (exchange / "owner.lock").exists()

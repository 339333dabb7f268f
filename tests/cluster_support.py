"""A verl job on tiny models and CPU, as a process of its own: start, watch, kill parts of it, clean up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

import verl_testing
from waiting import PATIENCE

MARK = "IWOPD_TEST_JOB"


class Job:
    """A command and everything that it starts, Ray's processes included, under one mark in their environment.

    with Job([...], log=folder / "log.txt") as job:
        job.wait_for(lambda: job.metrics(...))
        job.kill("ray::WorkerDict")
        assert job.finish() == 1
    """

    def __init__(self, command: Sequence[str], *, log: Path, variables: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self.log = log
        self.mark = uuid.uuid4().hex
        self.ray_folder = Path(tempfile.mkdtemp(prefix="iw", dir="/tmp"))  # short: sockets live there
        self.variables = {
            **os.environ,
            **verl_testing.environment(),
            MARK: self.mark,
            "RAY_TMPDIR": str(self.ray_folder),
            "RAY_AUTH_MODE": "disabled",  # else a token would have to travel from `ray start` to the jobs
            "RAY_raylet_start_wait_time_s": "600",  # busy computers take longer than Ray's 30 s
            "RAY_agent_register_timeout_ms": "600000",
            "RAY_memory_monitor_refresh_ms": "0",  # else it kills workers for the memory that other programs have
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **(variables or {}),
        }

    def __enter__(self) -> Self:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self.variables, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        shutil.rmtree(self.ray_folder, ignore_errors=True)

    def end(self) -> None:
        """Kill all of it."""
        deadline = time.monotonic() + PATIENCE
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                _kill(pid)
            time.sleep(0.2)
        self.process.wait(PATIENCE)

    def finish(self, seconds: float = PATIENCE) -> int:
        """The exit code; an error with the log's end if it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s; the log ends with:\n{self.text()[-3000:]}") from None

    def wait_for(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
        """Until `condition()` holds; an error with the log's end if the job ends first or it takes longer."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline:
                state = f"ended with {ended}" if ended is not None else f"not there after {seconds:.0f} s"
                raise AssertionError(f"{state}; the log ends with:\n{self.text()[-3000:]}")
            time.sleep(0.2)

    def text(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    def pids(self, title: str = "") -> list[int]:
        """Processes of this job whose title starts with `title`, oldest first."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words.startswith(title) and "State:\tZ" not in (folder / "status").read_text():
                    found.append(int(folder.name))
            except (OSError, ValueError):
                continue
        return sorted(found)

    def kill(self, title: str, which: int = 0) -> None:
        """End one process (SIGKILL) by its title, e.g. `ray::WorkerDict`."""
        pids = self.pids(title)
        assert len(pids) > which, f"no process number {which} is called {title!r}: {self.titles()}"
        _kill(pids[which])

    def titles(self) -> list[str]:
        """What its processes are called."""
        names = []
        for pid in self.pids():
            try:
                names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60])
            except OSError:
                continue
        return names


@contextmanager
def ray_cluster(log: Path, gpus: int) -> Iterator[str]:
    """A Ray cluster of one node with so many logical GPUs; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", f"--num-gpus={gpus}", "--num-cpus=16", "--include-dashboard=false"]
    with Job(command, log=log) as job:
        job.wait_for(lambda: "Ray runtime started" in job.text())
        yield f"127.0.0.1:{port}"


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file that may still grow."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


RECIPE = """
seed = 0
steps = {steps}
[models]
world = "clean"
[rollout]
prompts_per_step = 16
[engine.vllm]
tensor_parallel = 2
[optim]
lr = 0.0003
[checkpoint]
every = 1
[tracking]
console = "off"
[cluster]
gpus_per_node = 3
teacher_gpus = 1
[method]
weights = "cumulative-share"
[method.params]
gamma = 0.5
"""
"""Two workers with one rollout server, one teacher server. The learning rate moves the student within a few steps."""


def train(
    folder: Path,
    run: str,
    *arguments: str,
    steps: int = 4,
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Job:
    """`iwopd train --engine verl` of the tiny recipe into `folder / run`; `wrapper` is a command that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(steps=steps))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--engine", "verl", "--out", str(folder / run)]
    return Job([*wrapper, *command, *arguments], log=folder / f"{run}.log", variables=variables)


def steps(run: Path) -> list[dict[str, Any]]:
    """The training metrics of a run directory, one entry a step."""
    return lines(run / "metrics.jsonl")


def assert_same_steps(run: Path, whole: Path) -> None:
    """Sampling noise is a function of step and prompt: equal numbers mean equal weights, optimizer, step and data."""
    resumed, other = steps(run), steps(whole)
    assert [step["step"] for step in resumed] == [step["step"] for step in other]
    for own, theirs in zip(resumed, other, strict=True):
        assert own["tokens"] == theirs["tokens"]
        assert own["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert own["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert own["correction/ratio_deviation"] < 1e-4

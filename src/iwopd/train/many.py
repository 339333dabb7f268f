"""Many runs: each in a process of its own with one thread, a few at a time, skipped if finished, resumed if begun."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from iwopd.config import Config, config_toml
from iwopd.errors import UserError
from iwopd.train.rundir import RunDirectory, RunError

QUIET_SECONDS = 20
"""Without a terminal: a line at least this often."""


class ManyRunsError(UserError, RuntimeError):
    """A run of several failed; its last words are in the message."""


@dataclass(frozen=True, eq=False)
class Job:
    """A run to be made."""

    title: str
    folder: Path
    config: Config

    @property
    def finished(self) -> bool:
        """Whether the last step is done and evaluated."""
        run = RunDirectory(self.folder)
        try:
            run.about()
        except RunError:
            return False
        done = max((record["step"] for record in run.read("metrics.jsonl")), default=0)
        evaluated = max((record["step"] for record in run.read("evals.jsonl")), default=-1)
        return done >= self.config.steps and (not self.config.eval.prompts or evaluated >= self.config.steps)

    @property
    def steps_done(self) -> int:
        return sum(1 for _ in RunDirectory(self.folder).read("metrics.jsonl"))


def config_key(config: Config) -> str:
    """Names a run by everything that decides its outcome: what is shown and tracked does not."""
    plain = config.model_copy(update={"tracking": type(config.tracking)()})
    return hashlib.sha256(config_toml(plain).encode()).hexdigest()[:12]


def run_all(jobs: Sequence[Job], *, at_a_time: int, console: Console) -> None:
    """Make every run that is not finished yet. A failure ends all with the failed run's last words; nothing done is lost."""
    waiting = [job for job in jobs if not job.finished]
    if len(waiting) < len(jobs):
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are there already", highlight=False)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    clock = _Clock(sum(job.config.steps - job.steps_done for job in waiting))
    total = len(waiting)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        overall = progress.add_task("all", total=total)
        bars: dict[Job, TaskID] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    job = waiting.pop(0)
                    running[job] = _start(job)
                    bars[job] = progress.add_task(job.title, total=job.config.steps)
                time.sleep(0.25)
                for job, process in list(running.items()):
                    progress.update(bars[job], completed=job.steps_done)
                    if process.poll() is None:
                        continue
                    del running[job]
                    if process.returncode:
                        words = _log(job.folder).read_text(errors="replace")[-2000:]
                        raise ManyRunsError(f"the run {job.folder} failed with exit code {process.returncode}:\n{words}")
                    progress.remove_task(bars.pop(job))
                    progress.advance(overall)
                    if not console.is_terminal:
                        console.print(f"distilled: {job.title}", highlight=False)
                left = clock.left(sum(job.config.steps - job.steps_done for job in (*waiting, *running)))
                progress.update(overall, description=f"all{left}")
                if not console.is_terminal and clock.due():
                    console.print(f"{len(running)} runs under way, {len(waiting)} waiting{left}", highlight=False)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


class _Clock:
    """Time left, from the steps done since the start."""

    def __init__(self, steps: int) -> None:
        self.began, self.steps, self.last = time.monotonic(), steps, time.monotonic()

    def left(self, remaining: int) -> str:
        done = self.steps - remaining
        if done < 5:
            return ""
        seconds = (time.monotonic() - self.began) / done * remaining
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"

    def due(self) -> bool:
        if time.monotonic() - self.last < QUIET_SECONDS:
            return False
        self.last = time.monotonic()
        return True


def _start(job: Job) -> subprocess.Popen[bytes]:
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = job.folder.with_name(f"{job.folder.name}.toml")
    recipe.write_text(config_toml(job.config))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--out", str(job.folder)]
    if (job.folder / "run.json").exists():
        command.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with _log(job.folder).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")

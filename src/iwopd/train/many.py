"""Many runs: each in a process of its own with one thread, a few at a time, skipped if finished, resumed if begun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from iwopd.config import Config, config_toml
from iwopd.errors import UserError
from iwopd.runs.logs import Notes, RunError
from iwopd.runs.reading import Run

QUIET_SECONDS = 20
"""Without a terminal: a line at least this often."""


class ManyRunsError(UserError, RuntimeError):
    """A run of several failed; its last words are in the message."""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    title: str
    folder: Path
    config: Config

    @property
    def finished(self) -> bool:
        """Whether the last step is done and evaluated."""
        run = Run(self.folder)
        try:
            evaluated = max((record["step"] for record in run.log("evals.jsonl")), default=-1)
            done = min(run.step, evaluated) if self.config.eval.prompts else run.step
            return bool(run.about) and done >= self.config.steps
        except RunError:
            return False

    @property
    def steps_done(self) -> int:
        return len(Run(self.folder, notes=Notes()).metrics)


def run_all(
    planned: Sequence[PlannedRun],
    *,
    at_a_time: int,
    console: Console,
    finished: Callable[[PlannedRun], None] = lambda run: None,
) -> None:
    """Make every run that is not finished yet. A failure ends all with the failed run's last words; nothing done is lost.

    `finished` is told of every run as soon as it is made.
    """
    waiting = [run for run in planned if not run.finished]
    if len(waiting) < len(planned):
        console.print(f"{len(planned) - len(waiting)} of {len(planned)} runs are there already", highlight=False)
    running: dict[PlannedRun, subprocess.Popen[bytes]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    clock = _Clock(sum(run.config.steps - run.steps_done for run in waiting))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        overall = progress.add_task("all", total=len(waiting))
        bars: dict[PlannedRun, TaskID] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    run = waiting.pop(0)
                    running[run] = _start(run)
                    bars[run] = progress.add_task(run.title, total=run.config.steps)
                time.sleep(0.25)
                for run, process in list(running.items()):
                    progress.update(bars[run], completed=run.steps_done)
                    if process.poll() is None:
                        continue
                    del running[run]
                    if process.returncode:
                        words = _log(run.folder).read_text(errors="replace")[-2000:]
                        raise ManyRunsError(f"the run {run.folder} failed with exit code {process.returncode}:\n{words}")
                    finished(run)
                    progress.remove_task(bars.pop(run))
                    progress.advance(overall)
                    if not console.is_terminal:
                        console.print(f"distilled: {run.title}", highlight=False)
                left = clock.left(sum(run.config.steps - run.steps_done for run in (*waiting, *running)))
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


def _start(run: PlannedRun) -> subprocess.Popen[bytes]:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = run.folder.with_name(f"{run.folder.name}.toml")
    recipe.write_text(config_toml(run.config))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--out", str(run.folder)]
    if (run.folder / "run.json").exists():
        command.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with _log(run.folder).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")

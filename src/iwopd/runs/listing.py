"""Runs under a folder, each with its state and its result, as `iwopd runs` lists them. Damage is a state, never an error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iwopd.errors import UserError
from iwopd.methods import method_title
from iwopd.runs.alerts import find_alerts
from iwopd.runs.identity import student_name
from iwopd.runs.logs import Notes
from iwopd.runs.owner import FILE, WATCH, last_owner, owner_of
from iwopd.runs.reading import Run

MARKS = ("run.json", "metrics.jsonl", FILE)
"""A folder with one of these is a run's."""
DEEPEST = 4
"""Folders of folders that are looked through."""


@dataclass(frozen=True)
class TaskScore:
    """Accuracy of the last evaluation, and of the student before training."""

    task: str
    step: int
    mean: float
    before: float | None


@dataclass(frozen=True)
class Listed:
    """One run, or an empty folder."""

    path: Path
    state: str
    """running, finished, stopped (by a signal or an error; it said why), killed, damaged, or empty."""
    detail: str = ""
    """More about the state, in words."""
    step: int = 0
    steps: int | None = None
    method: str = ""
    student: str = ""
    scores: tuple[TaskScore, ...] = ()
    alerts: tuple[str, ...] = ()
    """Titles of those that are not over."""
    changed: float | None = None
    """When something was written last, in seconds since 1970."""


def find_runs(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Folders of runs, in order, and empty folders, where a run may have been meant to be."""
    if any((folder / name).exists() for name in MARKS):
        yield folder
        return
    try:
        children = sorted(folder.iterdir())
    except OSError:
        return
    if not children:
        yield folder
    for child in children if depth else []:
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from find_runs(child, depth - 1)


def describe(path: Path) -> Listed:
    """What the files of a run say."""
    if not any((path / name).exists() for name in MARKS):
        return Listed(path, "empty")
    damage = _damage(path)
    run = Run(path, notes=Notes())
    evaluated = max((one.step or 0 for one in run.evals), default=-1)
    waits = bool(run.setting("eval.prompts", int, 0)) and bool(run.evals) and evaluated < (run.steps or 0)
    state, detail = _state(path, finished=run.finished and not waits, damage=damage)
    return Listed(
        path,
        state,
        detail,
        step=run.step,
        steps=run.steps,
        method=method_title(run.setting("method", dict, {})) if run.config else "",
        student=student_name(run.setting("models", dict, {})) or "",
        scores=_scores(run),
        alerts=tuple(alert.title for alert in find_alerts(run.metrics) if alert.active),
        changed=_changed(path),
    )


def as_json(run: Listed) -> dict[str, Any]:
    scores = {one.task: {"step": one.step, "mean": one.mean, "before": one.before} for one in run.scores}
    names = ("state", "detail", "step", "steps", "method", "student", "changed")
    return {
        "run": str(run.path),
        **{name: getattr(run, name) for name in names},
        "scores": scores,
        "alerts": list(run.alerts),
    }


def _damage(path: Path) -> str:
    """What a strict reader says; empty: nothing. A log that is not there yet is no damage."""
    run = Run(path)
    if not (path / "run.json").exists() and owner_of(path) is not None:
        return ""  # it is about to be written
    try:
        _ = run.about, run.config, run.metrics, run.evals
    except UserError as error:
        return str(error)
    return ""


def _state(path: Path, *, finished: bool, damage: str) -> tuple[str, str]:
    if (owner := owner_of(path)) is not None:
        return "running", f"process {owner.pid} on {owner.host}"
    if damage:
        return "damaged", damage
    last = last_owner(path)
    if last is not None and not last.is_local and time.time() - (path / FILE).stat().st_mtime < WATCH:
        return "running", f"process {last.pid} on {last.host}, by its signs of life"
    if finished:
        return "finished", ""
    if last is not None:
        return "killed", f"process {last.pid} on {last.host} ended without a word"
    return "stopped", ""


def _scores(run: Run) -> tuple[TaskScore, ...]:
    found: dict[str, TaskScore] = {}
    for one in run.evals:  # by step
        step = one.step or 0
        first = found.get(one.task)
        before = one.mean if step == 0 else None if first is None else first.before
        found[one.task] = TaskScore(one.task, step, one.mean, before)
    return tuple(found.values())


def _changed(path: Path) -> float | None:
    with os.scandir(path) as entries:
        return max((entry.stat().st_mtime for entry in entries if entry.is_file(follow_symlinks=False)), default=None)

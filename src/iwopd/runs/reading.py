"""A run directory as it is: unfinished, damaged or of another version. What cannot be read is a note, or an error if asked."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from iwopd.runs.evaluations import ResultsError, read_task
from iwopd.runs.logs import Notes, number, read_log
from iwopd.types import EvalResult

FORMAT = 1
"""Of the files in a run directory."""
RUN_FILES = ("run.json", "config.toml", "metrics.jsonl")


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory. Each file is read when it is asked for, once; strict unless lenient `notes` are given."""

    path: Path
    name: str = ""
    notes: Notes = field(default_factory=lambda: Notes(strict=True))

    @cached_property
    def about(self) -> dict[str, Any]:
        """`run.json`."""
        file, guess = self.path / "run.json", "the format of the files is taken to be this version's"
        try:
            about = json.loads(file.read_text(encoding="utf-8", errors="replace"))
            if not isinstance(about, dict):
                raise ValueError("it is not an object")
        except FileNotFoundError:
            missing = f"{self.path} is not a run directory (no run.json); start one with `iwopd train RECIPE`"
            self.notes.damage(self.name, f"run.json is missing: {guess}", missing)
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.notes.damage(self.name, f"run.json cannot be read ({error}): {guess}", f"{file} is damaged: {error}")
            return {}
        if (found := about.get("format")) != FORMAT:
            known = f"this version of iwopd reads format {FORMAT}"
            text = f"written in format {found!r}, {known}: names may mean something else"
            self.notes.damage(self.name, text, f"{self.path} has format {found}, {known}")
        return about

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.toml` as it stands there, unvalidated: it may be another version's."""
        file = self.path / "config.toml"
        try:
            return tomllib.loads(file.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError) as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            text = f"config.toml {reason}: method, seed and planned steps are unknown"
            self.notes.damage(
                self.name, text, f"{file} {reason}, so nobody knows what was trained: copy the whole run directory"
            )
            return {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per step, in order."""
        by_step: dict[int, dict[str, Any]] = {}
        twice = 0
        for record in self.log("metrics.jsonl"):
            twice += record["step"] in by_step
            by_step[record["step"]] = record
        if twice:
            self.notes.add(self.name, f"metrics.jsonl has {twice} steps twice: the later record counts")
        ordered = [by_step[step] for step in sorted(by_step)]
        holes = ordered[-1]["step"] - ordered[0]["step"] + 1 - len(ordered) if ordered else 0
        if holes:
            self.notes.add(self.name, f"metrics.jsonl lacks {holes} of the steps up to {ordered[-1]['step']}")
        return ordered

    @cached_property
    def evals(self) -> list[EvalResult]:
        """By step and task. A later record replaces one of the same step."""
        results: dict[tuple[int, Any], EvalResult] = {}
        bad = 0
        for record in self.log("evals.jsonl"):
            step, task = record["step"], record.get("task")
            try:
                results[step, task] = read_task(task, record, f"{self.path / 'evals.jsonl'}, step {step}", step).result
            except ResultsError:
                if self.notes.strict:
                    raise
                bad += 1
        if bad:
            text = f"evals.jsonl: {bad} evaluations have scores that do not fit their problems and are left out"
            self.notes.add(self.name, text)
        return [results[key] for key in sorted(results)]

    @cached_property
    def sandboxes(self) -> dict[str, tuple[str, ...]]:
        """By task, in what generated programs were run; only tasks that run some."""
        found: dict[str, set[str]] = {}
        for record in self.log("evals.jsonl"):
            if isinstance(record.get("task"), str) and isinstance(used := record.get("sandbox"), str):
                found.setdefault(record["task"], set()).add(used[:200])
        return {task: tuple(sorted(names)) for task, names in found.items()}

    def log(self, name: str) -> Iterator[dict[str, Any]]:
        """The records of one of the logs."""
        return read_log(self.path / name, self.notes, self.name)

    def setting(self, name: str, kind: type, default: Any = None) -> Any:
        """A setting by its dotted name; the default where it is missing or of another type."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else default

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        return max([record["step"] for record in self.metrics], default=0)

    @property
    def steps(self) -> int | None:
        """How many steps the run is to have."""
        return cast(int | None, self.setting("steps", int))

    @property
    def finished(self) -> bool:
        return self.steps is not None and self.step >= self.steps

    @property
    def seed(self) -> int | None:
        return cast(int | None, self.setting("seed", int))

    def column(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric; None where a step has no finite number."""
        return [record["step"] for record in self.metrics], [number(record.get(name)) for record in self.metrics]


def read_runs(paths: Sequence[Path], notes: Notes) -> list[Run]:
    """Every run with something in it, leniently; a folder that holds run directories stands for them."""
    folders = list(dict.fromkeys(folder for path in paths for folder in _expand(path)))
    return [run for folder in folders if _has_content(run := Run(folder, _name(folder, folders), notes))]


def is_run(path: Path) -> bool:
    return any((path / name).exists() for name in RUN_FILES)


def _has_content(run: Run) -> bool:
    """Whether there is anything to show; says what is missing."""
    if not run.path.is_dir():
        run.notes.add(run.name, "there is no such directory" if not run.path.exists() else "this is not a directory")
        return False
    found = [run.about, run.config, run.metrics, run.evals]
    if not (any(found[2:]) or (run.path / "rollouts.jsonl").is_file()):
        run.notes.add(run.name, "there is no step, no evaluation and no rollout in it")
        return False
    if run.steps is not None and not run.finished:
        run.notes.add(run.name, f"unfinished: {run.step} of {run.steps} steps so far")
    return True


def _expand(path: Path) -> list[Path]:
    inside = sorted(child.parent for child in path.glob("*/run.json")) if path.is_dir() and not is_run(path) else []
    return inside or [path]


def _name(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's own name; with its parent's where two are called the same."""
    name = folder.resolve().name
    same = [other for other in folders if other.resolve().name == name]
    return name if len(same) == 1 else f"{folder.resolve().parent.name}/{name}"

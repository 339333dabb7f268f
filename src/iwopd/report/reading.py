"""Run directories and probes as they are: unfinished, damaged or of another version. What cannot be read becomes a note.

`train.rundir` is strict, because it writes; this reader is lenient, because a report on the remains is better than none.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from iwopd.errors import UserError
from iwopd.report.text import printable
from iwopd.train.rundir import FORMAT
from iwopd.types import EvalResult

if TYPE_CHECKING:
    from iwopd.report.probe_files import NamedProbe

HANDOFF_FORMAT = 1
RUN_FILES = ("run.json", "config.toml", "metrics.jsonl")
PROBE_FILE = "probe.json"


class ReportError(UserError, RuntimeError):
    """Nothing to report on, or nowhere to write it."""


class NothingToReportError(ReportError):
    """No run that can be read; while watching, not yet."""


@dataclass(frozen=True)
class Note:
    """Something that is missing or odd, and where."""

    where: str
    text: str


@dataclass
class Notes:
    """What the page lists under "What is missing"."""

    items: list[Note] = field(default_factory=list)

    def add(self, where: str, text: str) -> None:
        note = Note(where, text)
        if note not in self.items:
            self.items.append(note)


@dataclass(frozen=True)
class Run:
    """What could be read of one run directory."""

    path: Path
    name: str
    about: dict[str, Any]
    config: dict[str, Any]
    """`config.toml` as it stands there, unvalidated: it may be another version's."""
    metrics: list[dict[str, Any]]
    """One a step, in order."""
    evals: list[EvalResult]
    """In order of steps, at least one problem and one sample each."""

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
        steps: int | None = self.setting("steps", int)
        return steps

    @property
    def finished(self) -> bool:
        return self.steps is not None and self.step >= self.steps

    @property
    def seed(self) -> int | None:
        seed: int | None = self.setting("seed", int)
        return seed

    def column(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric; None where a step has no finite number."""
        return [record["step"] for record in self.metrics], [number(record.get(name)) for record in self.metrics]


def read_runs(paths: Sequence[Path], notes: Notes) -> list[Run]:
    """All runs that can be read at all; a folder that holds run directories stands for them."""
    folders = list(dict.fromkeys(folder for path in paths for folder in _expand(path)))
    runs = [run for folder in folders if (run := _read_run(folder, _name(folder, folders), notes)) is not None]
    if not runs:
        reasons = "; ".join(f"{note.where}: {note.text}" for note in notes.items) or "no run directory given"
        raise NothingToReportError(printable(f"nothing to report on. {reasons}"))
    return runs


def split_paths(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Runs and probes among the paths that a user named. A file is a probe; a folder is what it holds, maybe both."""
    runs: list[Path] = []
    probes: list[Path] = []
    for path in paths:
        if path.is_file():
            probes.append(path)
            continue
        own = path / PROBE_FILE
        inside = [own] if own.is_file() else [] if _is_run(path) else sorted(path.glob(f"*/{PROBE_FILE}"))
        probes += inside
        if not inside or _is_run(path) or any(path.glob("*/run.json")):
            runs.append(path)
    return list(dict.fromkeys(runs)), list(dict.fromkeys(probes))


def read_all(paths: Sequence[Path], probes: Sequence[Path], notes: Notes) -> tuple[list[Run], list[NamedProbe]]:
    """Runs and probes of a report; an error only if there is neither."""
    runs, among = split_paths(paths)
    found: list[NamedProbe] = []
    if among or probes:
        from iwopd.report.probe_files import read_probes  # loads everything that a probe needs, which takes seconds

        found = read_probes([*among, *probes], notes)
    if found and not runs:
        return [], found
    try:
        return read_runs(runs, notes), found
    except NothingToReportError:
        if not found:
            raise
        return [], found


def read_log(path: Path, where: str, notes: Notes) -> Iterator[dict[str, Any]]:
    """The records of a JSONL log that are objects with a step; the others are counted in a note."""
    if not path.is_file():
        notes.add(where, f"{path.name} is missing")
        return
    bad: list[int] = []
    cut = False
    line_number = 0
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line_number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] >= 0:
                    yield record
                elif not line.endswith("\n"):
                    cut = True  # written while we read, or cut off by a crash
                else:
                    bad.append(line_number)
    except OSError as error:
        notes.add(where, f"{path.name} cannot be read: {error.strerror}")
        return
    if bad:
        shown = ", ".join(map(str, bad[:3])) + (", …" if len(bad) > 3 else "")
        notes.add(where, f"{path.name}: {len(bad)} of {line_number} lines cannot be read and are left out (line {shown})")
    if cut:
        notes.add(where, f"{path.name}: the last line is cut off and left out (the run was stopped, or is writing just now)")
    if line_number == 0:
        notes.add(where, f"{path.name} is empty")


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:  # an integer beyond any float
            return None
    return 1.0 if value is True else 0.0 if value is False else None


def read_handoff(path: Path, notes: Notes) -> dict[str, Any] | None:
    """The demo's hand-off curve (`docs/report.md` has the format); None with a note where it does not fit."""
    try:
        curve = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if curve["format"] != HANDOFF_FORMAT:
            raise ValueError(f"it has format {curve['format']!r}, this version reads {HANDOFF_FORMAT}")
        points = sorted((float(share), _interval(values)) for share, values in curve["fractions"].items())
        if not points:
            raise ValueError("it has no points")
        student = None if curve.get("student") is None else _interval(curve["student"])
        teacher = None if curve.get("teacher") is None else _interval(curve["teacher"])
        problems = curve.get("problems") if isinstance(curve.get("problems"), int) else None
        return {
            "points": points,
            "student": student,
            "teacher": teacher,
            "problems": problems,
            "world": str(curve.get("world") or ""),
        }
    except OSError as error:
        notes.add(path.name, f"cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        notes.add(path.name, f"the hand-off curve cannot be read: {type(error).__name__}: {error}")
    return None


# --- one run --------------------------------------------------------------------------------------------------------


def _read_run(path: Path, name: str, notes: Notes) -> Run | None:
    if not path.is_dir():
        notes.add(name, "there is no such directory" if not path.exists() else "this is not a directory")
        return None
    about = _about(path, name, notes)
    config = _config(path, name, notes)
    metrics = _metrics(path, name, notes)
    evals = _evals(path, name, notes)
    if not (metrics or evals or (path / "rollouts.jsonl").is_file()):
        notes.add(name, "there is no step, no evaluation and no rollout in it")
        return None
    run = Run(path, name, about, config, metrics, evals)
    if run.steps is not None and not run.finished:
        notes.add(name, f"unfinished: {run.step} of {run.steps} steps so far")
    return run


def _about(path: Path, name: str, notes: Notes) -> dict[str, Any]:
    try:
        about = json.loads((path / "run.json").read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        notes.add(name, "run.json is missing: the format of the files is taken to be this version's")
        return {}
    except (OSError, ValueError, RecursionError):
        notes.add(name, "run.json cannot be read: the format of the files is taken to be this version's")
        return {}
    if not isinstance(about, dict):
        notes.add(name, "run.json is not an object: the format of the files is taken to be this version's")
        return {}
    if about.get("format") != FORMAT:
        notes.add(
            name,
            f"written in format {about.get('format')!r}, this version of iwopd reads {FORMAT}: names may mean something else",
        )
    return about


def _config(path: Path, name: str, notes: Notes) -> dict[str, Any]:
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        notes.add(name, "config.toml is missing: method, seed and planned steps are unknown")
    except (OSError, ValueError, RecursionError):
        notes.add(name, "config.toml cannot be read: method, seed and planned steps are unknown")
    return {}


def _metrics(path: Path, name: str, notes: Notes) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    twice = 0
    for record in read_log(path / "metrics.jsonl", name, notes):
        twice += record["step"] in by_step
        by_step[record["step"]] = record
    if twice:
        notes.add(name, f"metrics.jsonl has {twice} steps twice: the later record counts")
    ordered = [by_step[step] for step in sorted(by_step)]
    holes = ordered[-1]["step"] - ordered[0]["step"] + 1 - len(ordered) if ordered else 0
    if holes:
        notes.add(name, f"metrics.jsonl lacks {holes} of the steps up to {ordered[-1]['step']}")
    return ordered


def _evals(path: Path, name: str, notes: Notes) -> list[EvalResult]:
    results: dict[tuple[str, int], EvalResult] = {}
    bad = 0
    for record in read_log(path / "evals.jsonl", name, notes):
        try:
            ids = tuple(str(one) for one in record["problem_ids"])
            scores = torch.tensor(record["scores"], dtype=torch.float64)
            if not scores.numel():
                raise ValueError("no scores")
            result = EvalResult(str(record.get("task", "?")), ids, scores, record["step"])
            results[result.task, record["step"]] = result
        except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
            bad += 1
    if bad:
        notes.add(name, f"evals.jsonl: {bad} evaluations have scores that do not fit their problems and are left out")
    return [results[key] for key in sorted(results, key=lambda key: (key[1], key[0]))]


def _interval(values: Any) -> tuple[float, float | None, float | None]:
    mean, low, high = (number(values.get(name)) for name in ("mean", "low", "high"))
    if mean is None:
        raise ValueError("a point has no mean")
    return mean, low, high


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in RUN_FILES)


def _expand(path: Path) -> list[Path]:
    if path.is_dir() and not _is_run(path):
        inside = sorted(child.parent for child in path.glob("*/run.json"))
        return inside or [path]
    return [path]


def _name(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's own name; with its parent's where two are called the same."""
    name = folder.resolve().name
    same = [other for other in folders if other.resolve().name == name]
    return name if len(same) == 1 else f"{folder.resolve().parent.name}/{name}"

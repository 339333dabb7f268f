"""What a report is about: runs, probes and the demo's hand-off curve. What cannot be read becomes a note."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from iwopd.analysis.probe.result import PROBE_FILE, Probe
from iwopd.errors import UserError
from iwopd.report.probe_files import read_probes
from iwopd.report.text import printable
from iwopd.runs.logs import Notes, number
from iwopd.runs.reading import Run, is_run, read_runs

HANDOFF_FORMAT = 1


class ReportError(UserError, RuntimeError):
    """Nothing to report on, or nowhere to write it."""


class NothingToReportError(ReportError):
    """No run that can be read; while watching: not yet."""


def split_paths(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Runs and probes among the paths that a user named. A file is a probe; a folder is what it holds, maybe both."""
    runs: list[Path] = []
    probes: list[Path] = []
    for path in paths:
        if path.is_file():
            probes.append(path)
            continue
        own = path / PROBE_FILE
        inside = [own] if own.is_file() else [] if is_run(path) else sorted(path.glob(f"*/{PROBE_FILE}"))
        probes += inside
        if not inside or is_run(path) or any(path.glob("*/run.json")):
            runs.append(path)
    return list(dict.fromkeys(runs)), list(dict.fromkeys(probes))


def read_all(paths: Sequence[Path], probes: Sequence[Path], notes: Notes) -> tuple[list[Run], list[tuple[str, Probe]]]:
    """Runs and probes of a report; an error only if there is neither."""
    folders, among = split_paths(paths)
    found = read_probes([*among, *probes], notes)
    runs = read_runs(folders, notes)
    if not runs and not found:
        reasons = "; ".join(f"{note.where}: {note.text}" for note in notes.items) or "no run directory given"
        raise NothingToReportError(printable(f"nothing to report on. {reasons}"))
    return runs, found


def read_handoff(path: Path, notes: Notes) -> dict[str, Any] | None:
    """The demo's hand-off curve (`docs/report.md` has the format); None with a note where it does not fit."""
    try:
        curve = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if curve["format"] != HANDOFF_FORMAT:
            raise ValueError(f"it has format {curve['format']!r}, this version reads {HANDOFF_FORMAT}")
        points = sorted((float(share), _interval(values)) for share, values in curve["fractions"].items())
        if not points:
            raise ValueError("it has no points")
        return {
            "points": points,
            **{side: None if curve.get(side) is None else _interval(curve[side]) for side in ("student", "teacher")},
            "problems": curve["problems"] if isinstance(curve.get("problems"), int) else None,
            "world": str(curve.get("world") or ""),
        }
    except OSError as error:
        notes.add(path.name, f"cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        notes.add(path.name, f"the hand-off curve cannot be read: {type(error).__name__}: {error}")
    return None


def _interval(values: Any) -> tuple[float, float | None, float | None]:
    mean, low, high = (number(values.get(name)) for name in ("mean", "low", "high"))
    if mean is None:
        raise ValueError("a point has no mean")
    return mean, low, high

"""JSONL logs, read in one way: a last line without its newline is left out, any other line that cannot be read is damage.

Damage is an error for a strict reader (training, comparison) and a note for a lenient one (the report).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from iwopd.errors import UserError


class RunError(UserError, RuntimeError):
    """A run directory that cannot be used as asked, and what to do."""


@dataclass(frozen=True)
class Note:
    """Something that is missing or odd, and where."""

    where: str
    text: str


@dataclass
class Notes:
    """What a reader found missing or damaged; the report's page lists it under "What is missing"."""

    items: list[Note] = field(default_factory=list)
    strict: bool = False
    """Damage raises `RunError` instead."""

    def add(self, where: str, text: str) -> None:
        note = Note(where, text)
        if note not in self.items:
            self.items.append(note)

    def damage(self, where: str, text: str, error: str) -> None:
        """Something cannot be read: a note `text`, or for a strict reader the error."""
        if self.strict:
            raise RunError(error)
        self.add(where, text)


class Line(NamedTuple):
    number: int
    record: dict[str, Any] | None
    """None: this is not a JSON object."""
    whole: bool
    """False: the last line, without its newline. A crash cut it off, or somebody is writing it just now."""


def json_lines(path: Path) -> Iterator[Line]:
    """Every line of a JSONL file."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield Line(number, record if isinstance(record, dict) else None, line.endswith("\n"))


def read_log(path: Path, notes: Notes | None = None, where: str = "") -> Iterator[dict[str, Any]]:
    """The records of a run's log: objects with a step. Strict without `notes`; a log that is not there has no records."""
    notes = Notes(strict=True) if notes is None else notes
    if not path.is_file():
        notes.add(where, f"{path.name} is missing")
        return
    bad: list[int] = []
    cut, count = False, 0
    try:
        for count, record, whole in json_lines(path):
            if not whole:
                cut = True
            elif record is not None and type(record.get("step")) is int and record["step"] >= 0:
                yield record
            elif notes.strict:
                raise RunError(f"{path}, line {count} is damaged: it is not a JSON object with a step; remove it or start over")
            else:
                bad.append(count)
    except OSError as error:
        text = f"{path.name} cannot be read: {error.strerror}"
        notes.damage(where, text, f"{path.parent}: {text}")
        return
    if bad:
        shown = ", ".join(map(str, bad[:3])) + (", …" if len(bad) > 3 else "")
        notes.add(where, f"{path.name}: {len(bad)} of {count} lines cannot be read and are left out (line {shown})")
    if cut:
        notes.add(where, f"{path.name}: the last line is cut off and left out (the run was stopped, or is writing just now)")
    if count == 0:
        notes.add(where, f"{path.name} is empty")


def number(value: Any) -> float | None:
    """A finite number, or None; true and false are 1 and 0."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None

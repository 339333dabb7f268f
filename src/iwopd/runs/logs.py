"""JSONL logs, read in one way: a last line without its newline is left out, any other line that cannot be read is damage.

Damage is an error for a strict reader (training, comparison) and a note for a lenient one (the report).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from iwopd.errors import UserError

LAST_STEP = 2**53
"""Steps are smaller: a JSON number of any size is an int here."""


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


def split_lines(
    path: Path, is_sound: Callable[[dict[str, Any]], bool]
) -> tuple[list[tuple[bytes, dict[str, Any]]], list[tuple[int, bytes]]]:
    """Sound lines with their records, and damaged ones with their numbers. One that a crash cut off is neither."""
    kept: list[tuple[bytes, dict[str, Any]]] = []
    damaged: list[tuple[int, bytes]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and is_sound(record):
                kept.append((line, record))
            else:
                damaged.append((number, line))
    return kept, damaged


def set_aside(path: Path, damaged: Sequence[tuple[int, bytes]]) -> Path:
    """Keep damaged lines of a log beside it: somebody may want to know what they were."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        with aside.open("ab") as file:
            file.write(b"".join(line for _, line in damaged))
    except OSError as error:
        raise RunError(f"cannot write {aside}: {error.strerror or error}; make room, and try again") from None
    return aside


def sound_record(record: Mapping[str, Any]) -> bool:
    """Whether a record says which step it is of."""
    step = record.get("step")
    return type(step) is int and 0 <= step < LAST_STEP


def sound_metrics(record: Mapping[str, Any]) -> bool:
    """Whether a record of `metrics.jsonl` holds nothing but numbers, lists of them, and nulls."""
    values = (part for value in record.values() for part in (value if isinstance(value, list) else [value]))
    return sound_record(record) and all(value is None or number(value) is not None for value in values)


def listed(numbers: Sequence[int]) -> str:
    """`line 3, 5, 8, …`"""
    return "line " + ", ".join(map(str, numbers[:3])) + (", …" if len(numbers) > 3 else "")


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
            elif record is not None and sound_record(record):
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
        notes.add(where, f"{path.name}: {len(bad)} of {count} lines cannot be read and are left out ({listed(bad)})")
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

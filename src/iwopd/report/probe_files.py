"""Probes as they are: what does not fit together becomes a note, and the rest is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from iwopd.analysis.probe.result import MEASURED, PROBE_FILE, Curve, Part, Probe, ProbeError, read_probe
from iwopd.runs.logs import Notes

LARGEST = 1e12
"""No honest probe holds a larger number, and charts of larger ones break."""


def read_probes(paths: Sequence[Path], notes: Notes) -> list[tuple[str, Probe]]:
    """Name and content of all probes that can be read, without parts that do not fit together; the rest is in the notes."""
    files = list(dict.fromkeys(path / PROBE_FILE if path.is_dir() else path for path in paths))
    names = [path.resolve().parent.name if path.name == PROBE_FILE else path.stem for path in files]
    found = []
    for path, name in zip(files, names, strict=True):
        where = name if names.count(name) == 1 else str(path)
        try:
            found.append((where, _whole_parts(read_probe(path), where, notes)))
        except ProbeError as error:
            notes.add(where, f"this probe is left out: {error}")
    return found


def _whole_parts(probe: Probe, where: str, notes: Notes) -> Probe:
    """Without parts whose curves and edges differ in length, or whose numbers nobody could draw."""
    parts = {name: part for name in MEASURED if (part := getattr(probe, name)) is not None}
    faults = {name: fault for name, part in parts.items() if (fault := _fault(part)) is not None}
    for name, fault in faults.items():
        notes.add(where, f"the probe's part {name!r} is left out: {fault}")
    return probe.model_copy(update=dict.fromkeys(faults))


def _fault(part: Part, length: int | None = None) -> str | None:
    """Why a part cannot be drawn: the curves of a part are as long as its own axis, or the one around it."""
    axis = getattr(part, "edges", None) or getattr(part, "fractions", None)
    if hasattr(part, "edges") or hasattr(part, "fractions"):
        if not axis or any(later <= earlier for earlier, later in pairwise(axis)):
            return "its axis does not rise"
        length = len(axis) - hasattr(part, "edges")
    for name, value in part:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Curve) and any(len(values) != length for _, values in one):
                return f"{name} does not have one point for each of {length} places"
            if isinstance(one, Part) and (fault := _fault(one, length)) is not None:
                return fault
            if isinstance(one, float) and not abs(one) < LARGEST:
                return f"{name} holds a number that cannot be drawn"
    return None

"""Findings between processes: one JSON object a line, written as they come, so what was found before a crash is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from iwopd.train.doctor.findings import Finding


def write_findings(file: Path, findings: Iterable[Finding]) -> None:
    with file.open("a") as out:
        for finding in findings:
            out.write(json.dumps(asdict(finding)) + "\n")
            out.flush()


def read_findings(file: Path) -> Iterator[Finding]:
    """What a process has written; a line that it did not finish is left out."""
    if file.exists():
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield Finding(**json.loads(line))

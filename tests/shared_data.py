"""The real benchmark files, where they are: the folder IWOPD_DATA, or `shared/data` beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("IWOPD_DATA") or Path(__file__).parents[2] / "shared" / "data")


def shared(name: str) -> Path:
    """A real benchmark file; the test is skipped, with a message, where there is none."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {name} in {FOLDER}: set IWOPD_DATA to a folder with the benchmark files")
    return path

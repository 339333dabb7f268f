"""A tracker: a text file with the numbers of every step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Notebook:
    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        self.file = (folder / "notebook.txt").open("a", encoding="utf-8")
        self.file.write(f"{project}: {settings['method.objective']}\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(f"{step} {' '.join(sorted(values))}\n")

    def close(self) -> None:
        self.file.close()

"""The records of one real demo, kept in docs/example/demo.tar.xz: what its report and its picture are made of.

The records are kept, not the page: 130 kB instead of 1.5 MB, and the page on the site is what this version makes of them.
`iwopd demo`, then `python tools/example_records.py runs/demo` records another one and draws the pictures of README.md and
docs/tour.md; without a folder it draws them again. The numbers on these pages are checked against the records.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "docs" / "example" / "demo.tar.xz"
FIGURES = ARCHIVE.parents[1] / "figures"
PICTURES = {"accuracy-0": "demo-accuracy", "handoff": "demo-handoff"}
"""Charts of `iwopd figures`, and what they are called in docs/figures/."""
FILES = ("run.json", "config.toml", "prompts.json", "metrics.jsonl", "evals.jsonl", "rollouts.jsonl")


@contextmanager
def unpacked() -> Iterator[Path]:
    """The recorded demo as a folder: run directories, and `handoff.json` beside them."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def record(demo: Path) -> None:
    """Keep the records of a demo: the same bytes for the same demo, and nothing of this machine."""
    runs = sorted(file.parent for file in demo.glob("*/run.json"))
    files = [demo / "handoff.json", *(run / name for run in runs for name in FILES)]
    if missing := [str(file) for file in files if not file.exists()]:
        sys.exit(f"example_records: {demo} is not a whole demo, it has no {missing[0]}")
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for file in files:
            archive.add(file, file.relative_to(demo), filter=_plain)


def draw() -> list[Path]:
    """The pictures of the recorded demo."""
    from iwopd.report.paper import write_figures

    with unpacked() as demo:
        write_figures([demo], demo / "figures", file_format="svg")
        return [Path(shutil.copy(demo / "figures" / f"{name}.svg", FIGURES / f"{to}.svg")) for name, to in PICTURES.items()]


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info


if __name__ == "__main__":
    if sys.argv[1:]:
        record(Path(sys.argv[1]))
        print(f"{ARCHIVE}: {ARCHIVE.stat().st_size / 1000:.0f} kB")
    print(*draw(), sep="\n")

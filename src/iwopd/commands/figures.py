"""`iwopd figures`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "figures",
        help="the report's figures for a paper: PDF, SVG or PNG",
        description="Draws the charts of `iwopd report` for print: every chart in the width of a column (3.25 in), every "
        "section as a sheet in the width of a page (6.75 in), fonts embedded, in styles that the colour-blind can tell apart.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory, or a folder of run directories")
    parser.add_argument("--format", choices=("pdf", "svg", "png"), default="pdf", help="file format (default: pdf)")
    parser.add_argument("-o", "--out", type=Path, default=Path("figures"), help="folder for the files (default: figures)")
    parser.add_argument("--handoff", type=Path, help="hand-off curve (default: handoff.json beside the runs)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    import sys

    from iwopd.report import ReportError
    from iwopd.report.text import printable

    try:
        from iwopd.report.paper import write_figures
    except ImportError as error:
        raise ReportError(f"figures need matplotlib ({error}): pip install 'iwopd[figures]'") from None

    written, notes = write_figures(options.runs, options.out, file_format=options.format, handoff_file=options.handoff)
    for note in notes.items:
        print(printable(f"iwopd: {note.where}: {note.text}"), file=sys.stderr)
    print(printable(f"{len(written)} figures in {options.out}"))
    return 0

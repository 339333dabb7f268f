"""Draws the charts of `iwopd report` for print: every chart in the width of a column (3.25 in), every section as a sheet in
the width of a page (6.75 in), fonts embedded, in styles that the colour-blind can tell apart. With --layout paper: figures
1 to 4 as the paper arranges them; a place without data says what it needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from iwopd.commands.options import add_report_sources, check_report_sources, named_path

HELP = "the report's figures for a paper: PDF, SVG or PNG"


def add(parser: argparse.ArgumentParser) -> None:
    add_report_sources(parser)
    layout = "one file per chart, or the paper's figures (default: charts)"
    parser.add_argument("--layout", choices=("charts", "paper"), default="charts", help=layout)
    parser.add_argument("--format", choices=("pdf", "svg", "png"), default="pdf", help="file format (default: pdf)")
    parser.add_argument("-o", "--out", type=named_path, default=Path("figures"), help="folder for the files (default: figures)")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    import sys

    from iwopd.report import ReportError
    from iwopd.report.text import printable

    try:
        from iwopd.report.paper import write_figures
    except ImportError as error:
        raise ReportError(f"figures need matplotlib ({error}): pip install 'iwopd[figures]'") from None

    check_report_sources(options)
    sources = {"probes": options.probe, "handoff_file": options.handoff}
    written, notes = write_figures(options.runs, options.out, file_format=options.format, layout=options.layout, **sources)
    for note in notes.items:
        print(printable(f"iwopd: {note.where}: {note.text}"), file=sys.stderr)
    print(printable(f"{len(written)} figures in {options.out}"))
    return 0

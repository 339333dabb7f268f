"""Writes one self-contained HTML page on run directories and probes (`iwopd probe`). Of runs: comparison, learning curves,
gap, KL and weights along the answer, training health, and single answers token by token. Of probes: verdict, hand-off
curve, disagreement by position, prefix likelihoods, weight rules and gradient alignment. It opens from disk and needs no
network. What is unfinished or damaged is shown as far as it goes; it says what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from iwopd.commands.options import add_report_sources, check_report_sources, named_path

HELP = "one page on runs and probes: what was learned, and where the signal goes"


def add(parser: argparse.ArgumentParser) -> None:
    add_report_sources(parser)
    parser.add_argument("-o", "--out", type=named_path, default=Path("report.html"), help="the page (default: report.html)")
    parser.add_argument("--max-tokens", type=int, default=None, help="most tokens in the token view (default: 1,200,000)")
    parser.add_argument("--open", action="store_true", help="show the page in your browser")
    parser.add_argument("--watch", action="store_true", help="write the page again as the runs go on, until they are finished")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks with --watch (default: 5)")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.report import ReportError, write_report
    from iwopd.report.page import MAX_TOKENS
    from iwopd.report.text import printable
    from iwopd.report.watch import watch

    check_report_sources(options)
    max_tokens = MAX_TOKENS if options.max_tokens is None else options.max_tokens
    if max_tokens < 0:
        raise ReportError(f"--max-tokens must not be negative, got {max_tokens}")
    if not 0.1 <= options.every <= 3600:
        raise ReportError(f"--every must be between 0.1 and 3600 seconds, got {options.every:g}")

    def say(text: str) -> None:
        print(printable(text), flush=True)

    common = {"probes": options.probe, "handoff": options.handoff, "max_tokens": max_tokens}
    if options.watch:
        ready = partial(show, say=say) if options.open else None
        watch(options.runs, options.out, every=options.every, say=say, ready=ready, **common)
        return 0
    out = write_report(options.runs, options.out, **common)
    say(f"report: {out}")
    if options.open:
        show(out, say)
    return 0


def show(page: Path, say: Callable[[str], None]) -> None:
    """Open the page in the user's browser; where there is none, say what to open."""
    import webbrowser

    address = page.resolve().as_uri()
    try:
        opened = webbrowser.open(address)
    except (OSError, webbrowser.Error):
        opened = False
    if not opened:
        say(f"no browser could be started here: open {address} in yours, or set BROWSER to the name of one")

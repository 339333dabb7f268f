"""List runs: state, steps, last accuracy, method, and alerts that hold. A folder stands for all runs in it.

States: running; finished; stopped (by Ctrl-C, SIGTERM or an error: `iwopd train RUN --resume` goes on); killed (its process
ended without a word; --resume goes on, too); damaged (a file cannot be read); empty (a folder without a run).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from iwopd.commands.options import named_path

if TYPE_CHECKING:
    from iwopd.runs.listing import Listed

HELP = "list runs with their state and result"
COLOURS = {"running": "cyan", "finished": "green", "stopped": "yellow", "killed": "red", "damaged": "bold red", "empty": "dim"}
MANY = 50
"""More runs than this take seconds to read."""
WIDTH = 200
"""Columns where there is no terminal: nothing is cut."""


def add(parser: argparse.ArgumentParser) -> None:
    what = "run directory, or a folder of them (default: runs)"
    parser.add_argument("folders", nargs="*", type=named_path, default=[Path("runs")], metavar="FOLDER", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object per run instead of a table")


def run(options: argparse.Namespace, _rest: list[str]) -> int:
    from iwopd.runs.listing import as_json, describe, find_runs
    from iwopd.runs.logs import RunError
    from iwopd.stages import ConsoleStages, StageListener

    for folder in options.folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise RunError(f"{folder} {what}: name a folder of runs; `iwopd train RECIPE` makes runs/<recipe>-seed<seed>")
    paths = list(dict.fromkeys(path for folder in options.folders for path in find_runs(folder)))
    found = []
    with ExitStack() as stack:
        progress = stack.enter_context(ConsoleStages()) if len(paths) > MANY else StageListener()
        progress.stage("reading runs", len(paths))
        for path in paths:
            found.append(describe(path))
            progress.advance(1)
    if options.json:
        for one in found:
            print(json.dumps(as_json(one)))
    else:
        _print_table(found, options.folders)
    return 0


def _print_table(found: Sequence[Listed], folders: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not found:
        print(f"no runs in {', '.join(map(str, folders))}")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step", "result", "method", "student", "alerts", "written"):
        table.add_column(column, justify="right" if column == "step" else "left", overflow="fold")
    for one in found:
        steps = "" if one.state == "empty" else f"{one.step}/{'?' if one.steps is None else one.steps}"
        cells = (str(one.path), steps, _result(one), one.method, one.student, ", ".join(one.alerts), _age(one.changed))
        texts = [Text(cell) for cell in cells]
        texts.insert(1, Text(one.state, style=COLOURS[one.state]))
        texts[-2].stylize("red")
        table.add_row(*texts)
    console.print(table)
    for one in found:
        if one.detail and one.state in ("damaged", "running"):
            console.print(Text(f"{one.path}: {one.detail}", style=COLOURS[one.state]), soft_wrap=True)


def _result(one: Listed) -> str:
    """Of every task: accuracy before training and at the last evaluation."""
    words = []
    for score in one.scores:
        before = "" if score.before is None or score.step == 0 else f"{100 * score.before:.1f} → "
        words.append(f"{score.task} {before}{100 * score.mean:.1f} % (step {score.step})")
    return "; ".join(words)


def _age(changed: float | None) -> str:
    """How long ago, in words."""
    from iwopd.stages import duration

    if changed is None:
        return ""
    seconds = max(0.0, time.time() - changed)
    return f"{duration(seconds)} ago" if seconds < 2 * 86400 else time.strftime("%Y-%m-%d", time.localtime(changed))

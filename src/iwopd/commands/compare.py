"""Paired comparison on the same problems: score and difference of each task with interval and p-value, in words whether it is
distinguishable from noise, and how much data would settle it.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from iwopd.commands.options import named_path, picked, words

if TYPE_CHECKING:
    from iwopd.runs.results import ModelResults

HELP = "tell whether one method is better than another, or only luckier"
EPILOG = """\
results are directories: a run of `iwopd train`, or the output of `iwopd eval`
  PATH            named by its method and student
  PATH@STEP       a training run at this step; PATH@0 is the student before training
  NAME=PATH       called NAME; the same NAME again (or the same method) is another training seed of it
The first method is the baseline. Pairs are formed by task, training seed and problem.

examples
  iwopd compare runs/opd-seed0 runs/iw-opd-seed0
  iwopd compare runs/opd-seed* runs/iw-opd-seed* --format latex -o table.tex
  iwopd compare runs/opd-* runs/iw-opd-* --unit models.lineage
  iwopd compare OPD=out/a IW-OPD=out/b --metric majority@32 --tasks aime24,aime25

what the numbers mean
  One seed a side: the interval is a bootstrap over problems, p flips signs of the problems' differences. Both are about these
  models. Several seeds: interval and p are over seeds and problems together, about the methods. With --unit: a t interval and
  its p over units, about methods and models like these; a verdict takes four units. Holm p is corrected for all comparisons
  of the table. docs/evaluation.md has the protocol.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="[NAME=]PATH[@STEP]", help="results to compare, at least two")
    parser.add_argument("--format", choices=("table", "markdown", "latex", "json"), default="table", help="default: table")
    parser.add_argument("--baseline", metavar="NAME", help="what the others are compared with (default: the first)")
    metric = "mean, best@8, pass@1, majority@32: what K samples are worth (default: mean)"
    parser.add_argument("--metric", default="mean", help=metric)
    parser.add_argument("--step", type=int, help="step of all training runs (default: the last that was evaluated)")
    parser.add_argument("--tasks", help="comma-separated (default: all)")
    parser.add_argument("--level", type=float, default=0.95, help="confidence level (default: 0.95)")
    parser.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="KEY",
        help="what runs share and are not independent in: a setting (models.lineage, models.student), or PATH=UNIT for results "
        "that do not say it; seeds are averaged within a unit",
    )
    parser.add_argument("-o", "--output", type=named_path, metavar="FILE", help="write there instead of to the terminal")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from iwopd.analysis.compare import compare
    from iwopd.analysis.tables import print_comparison, render
    from iwopd.analysis.units import Units
    from iwopd.runs.evaluations import ResultsError

    tasks = words(options.tasks) if options.tasks is not None else None
    if tasks == []:
        raise ResultsError("--tasks is empty: name tasks, e.g. --tasks aime24,aime25")
    comparison = compare(
        [named_results(word, options.step) for word in options.results],
        tasks=tasks,
        units=Units.parse(options.unit),
        **picked(options, "metric", "baseline", "level"),
    )
    page = io.StringIO()
    if options.format != "table":
        page.write(render(comparison, options.format))
    elif options.output is not None:
        print_comparison(comparison, Console(file=page, width=120))
    else:
        print_comparison(comparison, Console())
    if options.output is None:
        print(page.getvalue(), end="")
        return 0
    try:
        options.output.write_text(page.getvalue(), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"cannot write {options.output}: {error.strerror}") from None
    return 0


def named_results(word: str, step: int | None = None) -> tuple[str | None, ModelResults]:
    """`[NAME=]PATH[@STEP]`; a path that exists as written is taken as it is."""
    from iwopd.runs.evaluations import ResultsError
    from iwopd.runs.results import load

    name, path = None, word
    if "=" in word and not Path(word).exists():
        name, _, path = word.partition("=")
        if not name or not path:
            raise ResultsError(f"{word!r} is not NAME=PATH")
    found = re.fullmatch(r"(.+)@(\d{1,9})", path)
    if found and not Path(path).exists():
        path, step = found[1], int(found[2])
        result = load(Path(path), step)
        return name or (result.method if step == 0 else f"{result.method}@{step}"), result
    folder = Path(path)
    is_run = (folder / "run.json").exists() and not (folder / "eval.json").exists()
    return name, load(folder, step if is_run else None)

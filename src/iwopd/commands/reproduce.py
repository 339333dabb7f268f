"""Redraw the paper's figures and tables on the embedded world: P1 to P10 of the method's list (p1 first or last 30 %, p2
hand-off, p3 IW-OPD against OPD with controls, p4 size ratio, p5 KL during training, p6 likelihood of prefixes, p7 ideal
weights, p8 ablations, p9 ExOPD, p10 stronger and weaker teacher), or all of them; `own`, the survival weights of ours
against OPD and IW-OPD at several learning rates; `objectives`, the reverse KL of whole distributions against the sampled
token, with and without survival weights, at three learning rates each, and the noise of their gradients; `divergences`,
the reverse KL against forward KL, Jensen-Shannon, and the four likeliest ids; `tokenizers`, a teacher with another
tokenizer against one with the student's; `rivals`, survival weights against their simplest rivals; `rates`, the same
at three learning rates; `updates`, several updates a batch; and `gate`, weights that follow the agreement of gradients before
and after drifts. `prediction`, by itself, trains nothing: it asks of all recorded
runs whether a probe of their pairs, made before training, ranks the methods as they end.

Tables are printed from the raw results in --results; only runs that are missing there are trained, a few at a time, and
recorded. Runs are named by the hash of their settings and resumed after an interruption. Lineages are the units: seeds are
averaged within them, intervals and p-values (Holm's, over all comparisons of an item) are over them, and a verdict takes four.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from iwopd.commands.options import named_path

HELP = "redraw the paper's figures and tables on the embedded world"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="ITEM",
        help="p1 ... p10, all (of these), own, objectives, divergences, tokenizers, rivals, rates, updates, gate, prediction",
    )
    parser.add_argument("--seeds", type=int, help="distillation seeds (default: 2; of objectives, divergences and horizons 1)")
    parser.add_argument("--lineages", type=int, help="lineages of teacher and student (default: 4)")
    parser.add_argument("--first-seed", type=int, default=0, help="number of the first seed")
    parser.add_argument("--first-lineage", type=int, default=0, help="number of the first lineage")
    parser.add_argument("--world", default="clean", help="embedded world: clean, drift or long")
    parser.add_argument("--steps", type=int, default=40, help="distillation steps")
    parser.add_argument("--lr", type=float, help="learning rate (default: the world's: 1e-4 in clean, 2e-4 in the others)")
    parser.add_argument("--prompts-per-step", type=int, help="batch size (default: 64 in clean, 32 in drift, 16 in long)")
    parser.add_argument("--problems", type=int, default=1000, help="evaluation problems")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, one thread each")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TITLE",
        help="train these rows of the tables only; the others are said to be missing",
    )
    parser.add_argument("--out", type=named_path, default=Path("runs/reproduce"), help="where the runs are kept")
    parser.add_argument("--results", type=named_path, default=Path("results"), help="folder of the raw results, JSONL files")
    parser.add_argument("--read-only", action="store_true", help="train and write nothing; say what was not run")
    parser.add_argument(
        "--collect",
        type=named_path,
        nargs="+",
        metavar="FOLDER",
        help="record the finished runs in these folders, first or only",
    )
    parser.add_argument("--markdown", type=named_path, help="write the tables as Markdown, too")
    parser.add_argument(
        "--figures", type=named_path, metavar="FOLDER", help="draw the learning curves as SVG (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _without_results(results: Path, out: Path, read_only: bool) -> str:
    """Where the recorded runs are, for somebody who has the package alone."""
    rest = f"only finished runs in {out} are known here" if read_only else f"every run that is not finished in {out} is trained"
    return (
        f"There is no folder {results}. The recorded runs behind docs/results.md are in the folder results/ of the repository "
        "and of the source distribution (iwopd-VERSION.tar.gz), not in the wheel: name it with --results FOLDER. "
        f"Without it, {rest}."
    )


def run(options: argparse.Namespace, rest: list[str]) -> int:
    import json
    from importlib.util import find_spec

    from rich.console import Console

    from iwopd.analysis.reproduce.command import ReproduceError, as_record, reproduce

    if not (options.items or options.collect):
        raise ReproduceError("nothing to do: name items (p1 ... p10, all, own, ...), or folders of runs with --collect")
    if options.results.exists() and not options.results.is_dir():
        raise ReproduceError(f"--results {options.results} is a file: name the folder of the JSONL files")
    if options.figures is not None and find_spec("matplotlib") is None:  # said now, not after an hour
        raise ReproduceError("--figures needs matplotlib: pip install 'iwopd[figures]'")
    console = Console(stderr=options.json)
    if not options.results.is_dir():
        console.print(_without_results(options.results, options.out, options.read_only), highlight=False, soft_wrap=True)
    if "prediction" in options.items:
        from iwopd.analysis.reproduce.prediction import prediction_alone

        sections = [prediction_alone(options.items, options.results, console, options.markdown, measure=not options.read_only)]
    else:
        sections = reproduce(options, console)
    if options.figures is not None:
        from iwopd.report.reproduction import write_figures

        for path in write_figures(sections, options.figures):
            console.print(f"figure: {path}", highlight=False)
    if options.json:
        print(json.dumps(as_record(sections)))
    return 0

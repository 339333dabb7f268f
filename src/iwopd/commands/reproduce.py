"""Redraw the paper's figures and tables on the embedded world: P1 to P10 of the method's list (p1 first or last 30 %, p2
hand-off, p3 IW-OPD against OPD with controls, p4 size ratio, p5 KL during training, p6 likelihood of prefixes, p7 ideal
weights, p8 ablations, p9 ExOPD, p10 stronger and weaker teacher), or all of them; `own`, the survival weights of ours
against OPD and IW-OPD at several learning rates; `objectives`, the reverse KL of whole distributions against the sampled
token, with and without survival weights, at three learning rates each, and the noise of their gradients; `divergences`,
the reverse KL against forward KL, Jensen-Shannon, and the four likeliest ids; and `tokenizers`, a teacher with another
tokenizer against one with the student's.

Runs are named by the hash of their settings, made a few at a time, kept, and resumed after an interruption: a second call
only reads. Differences are paired by lineage, seed and problem, with 95 % intervals over runs and problems.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

HELP = "redraw the paper's figures and tables on the embedded world"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "items", nargs="+", metavar="ITEM", help="p1 ... p10, all (of these), own, objectives, divergences, or tokenizers"
    )
    parser.add_argument(
        "--seeds", type=int, help="distillation seeds (default: 3; of objectives and divergences 1, of tokenizers 2)"
    )
    parser.add_argument("--lineages", type=int, help="lineages of teacher and student (default: 2; of the last three items 4)")
    parser.add_argument("--first-seed", type=int, default=0, help="number of the first seed")
    parser.add_argument("--first-lineage", type=int, default=0, help="number of the first lineage")
    parser.add_argument("--world", default="clean", help="embedded world: clean or drift")
    parser.add_argument("--steps", type=int, default=40, help="distillation steps")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--prompts-per-step", type=int, default=64, help="batch size")
    parser.add_argument("--problems", type=int, default=1000, help="evaluation problems")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="where the runs are kept")
    parser.add_argument("--markdown", type=Path, help="write the tables as Markdown, too")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the learning curves as SVG (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    import json
    from importlib.util import find_spec

    from rich.console import Console

    from iwopd.analysis.reproduce.command import ReproduceError, as_record, reproduce

    if options.figures is not None and find_spec("matplotlib") is None:  # said now, not after an hour
        raise ReproduceError("--figures needs matplotlib: pip install 'iwopd[figures]'")
    console = Console(stderr=options.json)
    sections = reproduce(options, console)
    if options.figures is not None:
        from iwopd.report.reproduction import write_figures

        for path in write_figures(sections, options.figures):
            console.print(f"figure: {path}", highlight=False)
    if options.json:
        print(json.dumps(as_record(sections)))
    return 0

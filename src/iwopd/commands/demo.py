"""Trains a teacher and a student from nothing, distils with OPD, IW-OPD, Prefix-30 and Suffix-30 on the same prompts with the
same sampling noise, and shows what comes out. On two cores: minutes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from iwopd.commands.engine_options import add_engine_options, engine_choice
from iwopd.commands.options import named_path
from iwopd.errors import UserError

HELP = "see the position bias on your own CPU, in minutes"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", default=None, help="embedded world: clean, drift or long (default: the one that shows most)")
    parser.add_argument("--lineage", type=int, default=0, help="lineage of the models: another initialisation and data order")
    parser.add_argument("--seeds", type=int, default=1, help="distillation seeds per method (3 for the careful)")
    parser.add_argument("--first-seed", type=int, default=0, help="number of the first seed")
    parser.add_argument("--steps", type=int, default=40, help="distillation steps")
    parser.add_argument("--methods", default="opd,iw-opd,prefix-30,suffix-30", help="comma-separated: see `iwopd methods`")
    parser.add_argument(
        "--out", type=named_path, default=Path("runs/demo"), help="where the runs go (replaced if it is a demo's)"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, one thread each")
    add_engine_options(parser)
    parser.add_argument("--refresh", action="store_true", help="train the world's models again")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.demo import run_demo

    if options.lineage < 0:
        raise UserError(f"--lineage must be at least 0, got {options.lineage}")
    return run_demo(options, engine_choice(options))

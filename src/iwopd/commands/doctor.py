"""Check that a recipe's models, data and machine fit together. Each line is pass, warn or fail, with the remedy; the exit code
is 1 if anything failed. Settings can be overridden as in `iwopd train`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from iwopd.commands.options import parse_overrides

HELP = "look at a recipe before it trains"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML recipe")
    parser.add_argument("--static", action="store_true", help="only what needs no model weights")
    parser.add_argument("--out", type=Path, help="run directory, for the disk space (default: as `iwopd train` would choose)")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.config import load_config

    config = load_config(options.recipe, parse_overrides(rest))

    from iwopd.train.assembly import assemble
    from iwopd.train.doctor import Finding, examine_models, examine_recipe
    from iwopd.train.progress import pretraining_progress

    folder = options.out or Path("runs") / f"{options.recipe.stem}-seed{config.seed}"
    findings: list[Finding] = []

    def show(found: Iterable[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            print(finding.text(), flush=True)

    show(examine_recipe(config, folder, static=options.static))
    failed = any(finding.level == "fail" for finding in findings)
    if not options.static and not failed:
        with pretraining_progress() as progress:
            parts = assemble(config, lambda _: None, progress)
        with parts:
            show(examine_models(config, parts, folder))
    counts = Counter(finding.level for finding in findings)
    skipped = " (the models were not loaded, because of the failures above)" if failed and not options.static else ""
    print(f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed{skipped}")
    return 1 if counts["fail"] else 0

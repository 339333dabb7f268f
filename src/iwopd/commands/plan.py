"""Estimate memory, time and cost of a recipe on GPUs that need not be here: will it fit, and what is the bottleneck. Reads the
models' shapes, never their weights. The exit code is 1 if it does not fit. Settings can be overridden as in `iwopd train`.
How good the estimate is: docs/plan.md.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from iwopd.commands.options import named_path, parse_overrides
from iwopd.recipes import find

if TYPE_CHECKING:
    from iwopd.cluster.plan import CutLengths

HELP = "estimate what a recipe needs on a cluster"


MOST_GPUS = 8192
"""Every split of them is looked at."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=find, help="TOML file, or a name of `iwopd recipes`")
    parser.add_argument("--gpu", default="h100", help="a100-40, a100-80, h100 (default), h200, b200, l40s, rtx4090")
    parser.add_argument("--nodes", type=int, help="machines (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each machine (default: 8; 1 machine x 1: the local engine)")
    choice = "who trains (default: verl, on 1 GPU local); local: this package's trainer, a process on each GPU (torchrun)"
    parser.add_argument("--engine", choices=["local", "verl"], help=choice)
    parser.add_argument("--response-tokens", type=float, help="mean length of an answer (default: a quarter of the longest)")
    measured = "probe.json of the pair (or its folder): how long its answers are, and what a horizon leaves of them"
    parser.add_argument("--probe", type=named_path, metavar="FILE", help=measured)
    parser.add_argument("--price", type=float, help="of one GPU-hour, in any currency (default: GPU-hours only)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    import json

    from iwopd.config import load_config

    config = load_config(options.recipe, parse_overrides(rest))

    from iwopd.cluster.plan import PlanError, as_dict, find_gpu, make_plan, open_workload, report

    gpu = find_gpu(options.gpu)
    nodes = config.cluster.nodes if options.nodes is None else options.nodes
    gpus = config.cluster.gpus_per_node if options.gpus_per_node is None else options.gpus_per_node
    for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus)):
        if value < 1:
            raise PlanError(f"{name} is {value}: it must be at least 1")
    if nodes * gpus > MOST_GPUS:
        raise PlanError(f"--nodes x --gpus-per-node is {nodes * gpus:,} GPUs: a plan is made for at most {MOST_GPUS:,}")
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise PlanError(f"--price is {options.price:g}: it must be a price, 0 or more")
    quantiles, cut = _lengths(options)
    plan = make_plan(open_workload(config, options.response_tokens, quantiles), gpu, nodes, gpus, cut, options.engine)
    print(json.dumps(as_dict(plan, options.price), indent=1) if options.json else report(plan, options.price))
    return 0 if plan.fits else 1


def _lengths(options: argparse.Namespace) -> tuple[tuple[float, ...], list[CutLengths]]:
    """Quantiles of the lengths of whole answers, and of what is left of them by horizon; nothing without a probe."""
    from iwopd.analysis.probe.result import read_probe
    from iwopd.cluster.plan import CutLengths, PlanError

    if options.probe is None:
        return (), []
    if options.response_tokens is not None:
        raise PlanError("--response-tokens and --probe both say how long answers are: leave one of them out")
    part = read_probe(options.probe).horizons
    if part is None:
        raise PlanError(
            f"the probe {options.probe} has no lengths of answers (part 'horizons'): run `iwopd probe` again without "
            "--skip horizons"
        )
    found = [CutLengths(one.section, tuple(length or 1.0 for length in one.lengths)) for one in part.horizons]
    return found[0].quantiles, found[1:]

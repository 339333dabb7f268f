"""Estimate memory, time and cost of a recipe on GPUs that need not be here: will it fit, and what is the bottleneck. Reads the
models' shapes, never their weights. The exit code is 1 if it does not fit. Settings can be overridden as in `iwopd train`.
How good the estimate is: docs/plan.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from iwopd.commands.options import parse_overrides

HELP = "estimate what a recipe needs on a cluster"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML recipe")
    parser.add_argument("--gpu", default="h100", help="a100-40, a100-80, h100 (default), h200, b200, l40s, rtx4090")
    parser.add_argument("--nodes", type=int, help="machines (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each machine (default: 8; 1 machine x 1: the local engine)")
    parser.add_argument("--response-tokens", type=float, help="mean length of an answer (default: a quarter of the longest)")
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
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise PlanError(f"--price is {options.price:g}: it must be a price, 0 or more")
    plan = make_plan(open_workload(config, options.response_tokens), gpu, nodes, gpus)
    print(json.dumps(as_dict(plan, options.price), indent=1) if options.json else report(plan, options.price))
    return 0 if plan.fits else 1

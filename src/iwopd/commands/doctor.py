"""Check that a recipe's models, data and machine fit together. Each line is pass, warn or fail, with the remedy; the exit code
is 1 if anything failed. Settings can be overridden as in `iwopd train`.

With --self-check: also the pipeline on questions whose answers are known. The student teaches itself (the gap must be 0), who
scores is asked again in other orders and batches, scores must belong to their tokens, and the update is computed once more in
the plainest way.

With --gpu: the checklist for a machine with GPUs, which needs no recipe: device, kernels, FlashAttention, processes that talk
to each other, vLLM, and three training steps compared with the CPU's. It ends with "ready", or with what to do.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from iwopd.commands.options import named_path, parse_overrides
from iwopd.recipes import find

if TYPE_CHECKING:
    from iwopd.config import Config
    from iwopd.train.doctor import Finding

HELP = "look at a recipe, or at a GPU, before it trains"


def add(parser: argparse.ArgumentParser) -> None:
    recipe = "TOML file, or a name of `iwopd recipes`; may be left out with --gpu"
    parser.add_argument("recipe", type=find, nargs="?", help=recipe)
    parser.add_argument("--static", action="store_true", help="only what needs no model weights")
    parser.add_argument(
        "--self-check", action="store_true", help="also the pipeline on questions whose answers are known: no silent faults"
    )
    parser.add_argument(
        "--out", type=named_path, help="run directory, for the disk space (default: as `iwopd train` would choose)"
    )
    parser.add_argument("--ranks", type=int, help="processes that will train on this machine, for the memory of each")
    parser.add_argument("--gpu", action="store_true", help="the checklist for a machine with GPUs (docs/first-gpu-run.md)")
    parser.add_argument("--device", help="with --gpu: cuda:1, ... or cpu (default: the first GPU)")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.config import ConfigError, load_config

    if options.device is not None and not options.gpu:
        raise ConfigError("--device goes with --gpu")
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks is {options.ranks}: processes that train are at least 1")
    if options.static and options.gpu:
        raise ConfigError("--static looks at no device, --gpu at nothing else: leave one of them out")
    if options.self_check and (options.static or options.gpu):
        raise ConfigError("--self-check runs the recipe's own models: leave --static and --gpu out")
    if options.recipe is None:
        if not options.gpu:
            raise ConfigError("name a recipe (iwopd doctor my.toml), or ask for the GPU's checklist (iwopd doctor --gpu)")
        return _examine_gpu(options, None, ())
    config = load_config(options.recipe, parse_overrides(rest))
    if options.gpu:
        out = [] if options.out is None else ["--out", str(options.out)]
        return _examine_gpu(options, config, [str(options.recipe), *out, *rest])
    return _examine(options, config)


def _examine(options: argparse.Namespace, config: Config) -> int:
    from iwopd.errors import UserError
    from iwopd.stages import ConsoleStages
    from iwopd.train.assembly import assemble
    from iwopd.train.doctor import examine_models, examine_pipeline, examine_recipe
    from iwopd.train.doctor.findings import failure
    from iwopd.train.progress import pretraining_progress

    folder = options.out or Path("runs") / f"{options.recipe.stem}-seed{config.seed}"
    findings: list[Finding] = []
    say = partial(print, file=sys.stderr, flush=True)
    _show(examine_recipe(config, folder, static=options.static, ranks=options.ranks, say=say), findings)
    failed = any(finding.level == "fail" for finding in findings)
    if not options.static and not failed:
        say("loading the models, and comparing their heads with their own logits")
        try:
            with pretraining_progress() as progress:
                parts = assemble(config, lambda _: None, progress)
        except UserError as error:
            _show([failure("models", str(error), "")], findings)
            return _count(findings, " (nothing more could be looked at)")
        with parts:
            _show(examine_models(config, parts, folder, say=say), findings)
            if options.self_check:
                with ConsoleStages() as stages:
                    _show(examine_pipeline(config, parts, stages), findings)
    skipped = " (the models were not loaded, because of the failures above)" if failed and not options.static else ""
    return _count(findings, skipped)


def _examine_gpu(options: argparse.Namespace, config: Config | None, recipe: Sequence[str]) -> int:
    from iwopd.train.doctor.gpu import examine_gpu, verdict

    findings: list[Finding] = []
    say = partial(print, file=sys.stderr, flush=True)
    _show(examine_gpu(options.device, config, recipe, say), findings)
    code = _count(findings)
    print(verdict(findings))
    return code


def _show(found: Iterable[Finding], findings: list[Finding]) -> None:
    for finding in found:
        findings.append(finding)
        print(finding.text(), flush=True)


def _count(findings: Sequence[Finding], remark: str = "") -> int:
    """Say how many lines passed; the exit code."""
    counts = Counter(finding.level for finding in findings)
    print(f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed{remark}")
    return 1 if counts["fail"] else 0

"""Thin commands. Each reads its arguments, calls a function, and turns an expected failure into one clear line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import iwopd

EXPECTED = (
    "ConfigError",
    "SamplingError",
    "DataError",
    "RunError",
    "CheckpointError",
    "TrainingStoppedError",
    "UnknownRuleError",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":
        parser.error(f"unknown argument {rest[0]!r}; see `iwopd {options.command} --help`")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        code = options.run(options, rest)
    except KeyboardInterrupt:
        print("iwopd: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        if type(error).__name__ not in EXPECTED:
            raise
        print(f"iwopd: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", 2)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="iwopd",
        description="Importance-weighted on-policy distillation. Start with `iwopd demo`: it needs no download and no GPU.",
    )
    parser.add_argument("--version", action="version", version=f"iwopd {iwopd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a student by a recipe",
        description="Train a student by a recipe (a TOML file). Any setting can be overridden by its dotted name: "
        "--optim.lr 1e-4 --method.params '{gamma = 1.0}'. The run directory holds settings, metrics, evaluations, checkpoints.",
        epilog=_settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("recipe", type=Path, help="TOML recipe; with --resume also a run directory")
    train.add_argument("--out", type=Path, help="run directory (default: runs/<recipe>-seed<seed>)")
    train.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint of the run directory")
    train.add_argument("--allow-changes", action="store_true", help="resume although settings or data differ")
    train.set_defaults(run=_train)

    demo = commands.add_parser(
        "demo",
        help="see the position bias on your own CPU, in minutes",
        description="Trains a teacher and a student from nothing, distils with OPD, IW-OPD, Prefix-30 and Suffix-30 on the "
        "same prompts with the same sampling noise, and shows what comes out. On two cores: minutes.",
    )
    demo.add_argument("--world", default=None, help="embedded world: clean or drift (default: the one that shows most)")
    demo.add_argument("--lineage", type=int, default=0, help="lineage of the models: another initialisation and data order")
    demo.add_argument("--seeds", type=int, default=1, help="distillation seeds per method (3 for the careful)")
    demo.add_argument("--first-seed", type=int, default=0, help="number of the first seed")
    demo.add_argument("--steps", type=int, default=40, help="distillation steps")
    demo.add_argument("--methods", default="opd,iw-opd,prefix-30,suffix-30", help="comma-separated: see `iwopd methods`")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the runs go (replaced if it is a demo's)")
    demo.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, one thread each")
    demo.add_argument("--refresh", action="store_true", help="train the world's models anew")
    demo.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    demo.set_defaults(run=_demo)

    methods = commands.add_parser("methods", help="list every method and weight rule with formula and parameters")
    methods.set_defaults(run=_methods)
    return parser


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.config import ConfigError, load_config
    from iwopd.train.progress import pretraining_progress
    from iwopd.train.run import run_training

    overrides = parse_overrides(rest)
    recipe: Path = options.recipe
    folder: Path | None = options.out
    if (recipe / "run.json").exists():
        if not options.resume:
            raise ConfigError(f"{recipe} is a run directory: continue it with --resume")
        folder, recipe = folder or recipe, recipe / "config.toml"
    config = load_config(recipe, overrides)
    folder = folder or Path("runs") / f"{recipe.stem}-seed{config.seed}"
    with pretraining_progress() as progress:
        done = run_training(config, folder, resume=options.resume, allow_changes=options.allow_changes, progress=progress)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{done.step} steps done; run directory: {folder}")
    return 0


def _demo(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.demo import run_demo

    return run_demo(options)


def _methods(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.methods_table import print_methods

    print_methods()
    return 0


def parse_overrides(rest: Sequence[str]) -> dict[str, Any]:
    """`--optim.lr 1e-4` and `--optim.lr=1e-4`, in any number."""
    from iwopd.config import ConfigError, parse_value

    overrides: dict[str, Any] = {}
    words = iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"do not know what to do with {word!r}; settings look like --optim.lr 1e-4")
        name, given, text = word[2:].partition("=")
        if not given:
            text = next(words, "")
            if not text or text.startswith("--"):
                raise ConfigError(f"--{name} needs a value, e.g. --{name} 1")
        overrides[name.replace("-", "_")] = parse_value(text)
    return overrides


def _settings_help() -> str:
    from iwopd.config import settings

    lines = ["settings (dotted name, default, meaning):"]
    for name, info in settings():
        default = "" if info.is_required() else info.get_default(call_default_factory=True)
        shown = "-" if default is None or default == "" else default
        lines.append(f"  --{name:<34} {shown!s:<12} {info.description or ''}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

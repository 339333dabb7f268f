"""Train a student by a recipe (a TOML file). Any setting can be overridden by its dotted name: --optim.lr 1e-4 --method.params
'{gamma = 1.0}'. The run directory holds settings, metrics, evaluations, checkpoints.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from iwopd.commands.options import parse_overrides

HELP = "train a student by a recipe"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help message and exit")
    parser.add_argument("recipe", type=Path, help="TOML recipe; with --resume also a run directory")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/<recipe>-seed<seed>)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint of the run directory")
    parser.add_argument("--allow-changes", action="store_true", help="resume although settings or data differ")
    parser.add_argument("--no-doctor", action="store_true", help="train without the checks of `iwopd doctor`")
    verl = parser.add_argument_group("on a cluster (docs/cluster.md)")
    verl.add_argument("--engine", choices=("local", "verl"), help="who trains (default: local; with --resume as it was begun)")
    verl.add_argument("--nodes", type=int, help="machines: cluster.nodes")
    verl.add_argument("--gpus-per-node", type=int, help="GPUs of each: cluster.gpus_per_node")
    verl.add_argument("--ray-address", help="a running Ray cluster: auto, host:port (default: RAY_ADDRESS, else its own Ray)")
    verl.add_argument("--dry-run", action="store_true", help="print verl's whole command, and do nothing")


class _Help(argparse.Action):
    """Help with all settings. They are read when somebody asks: other commands need not wait for the tree of settings."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.epilog, parser.formatter_class = _settings_help(), argparse.RawDescriptionHelpFormatter
        parser.print_help()
        parser.exit()


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.config import ConfigError, load_config

    overrides = parse_overrides(rest)
    recipe: Path = options.recipe
    folder: Path | None = options.out
    saved = (recipe / "run.json").exists()
    if saved:
        if not options.resume:
            raise ConfigError(f"{recipe} is a run directory: continue it with --resume")
        folder, recipe = folder or recipe, recipe / "config.toml"
    on_verl = _engine(options, folder) == "verl"
    for name in ("nodes", "gpus_per_node"):
        if getattr(options, name) is not None:
            overrides[f"cluster.{name}"] = getattr(options, name)
    config = load_config(recipe, overrides, saved=saved)
    folder = folder or Path("runs") / f"{recipe.stem}-seed{config.seed}"

    from iwopd.train.progress import pretraining_progress

    how = {"resume": options.resume, "allow_changes": options.allow_changes, "doctor": not options.no_doctor}
    with pretraining_progress() as progress:
        if on_verl:
            from iwopd.cluster.verl.launch import dry_run, run_on_verl

            if options.dry_run:
                print(dry_run(config, folder, resume=options.resume, address=options.ray_address))
                return 0
            step = run_on_verl(config, folder, address=options.ray_address, progress=progress, **how)
        else:
            from iwopd.train.run import run_training

            step = run_training(config, folder, progress=progress, **how).step
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{step} steps done; run directory: {folder}")
    return 0


def _engine(options: argparse.Namespace, folder: Path | None) -> str:
    """The engine that is asked for, or of the run that goes on."""
    from iwopd.config import ConfigError

    engine: str | None = options.engine
    if engine is None and options.resume and folder is not None and (folder / "run.json").exists():
        from iwopd.runs.directory import RunDirectory

        engine = RunDirectory(folder).engine
    given = {"--nodes": options.nodes, "--gpus-per-node": options.gpus_per_node, "--ray-address": options.ray_address}
    unfit = [name for name, value in given.items() if value is not None] + (["--dry-run"] if options.dry_run else [])
    if engine in (None, "local") and unfit:
        raise ConfigError(f"{unfit[0]} goes with --engine verl")
    return engine or "local"


def _settings_help() -> str:
    from iwopd.config import settings

    lines = ["settings (dotted name, default, meaning):"]
    for name, info in settings():
        default = "" if info.is_required() else info.get_default(call_default_factory=True)
        shown = "-" if default is None or default == "" else default
        lines.append(f"  --{name:<34} {shown!s:<12} {info.description or ''}")
    return "\n".join(lines)

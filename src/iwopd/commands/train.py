"""`iwopd train`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iwopd.config import Config


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a student by a recipe",
        description="Train a student by a recipe (a TOML file). Any setting can be overridden by its dotted name: "
        "--optim.lr 1e-4 --method.params '{gamma = 1.0}'. The run directory holds settings, metrics, evaluations, checkpoints.",
        epilog=_settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, rest: list[str]) -> int:
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
    engine = _engine(options, folder)
    overrides |= {
        name: value
        for name, value in (("cluster.nodes", options.nodes), ("cluster.gpus_per_node", options.gpus_per_node))
        if value is not None
    }
    config = load_config(recipe, overrides)
    folder = folder or Path("runs") / f"{recipe.stem}-seed{config.seed}"
    if engine == "verl":
        return _run_on_verl(options, config, folder)
    with pretraining_progress() as progress:
        done = run_training(
            config,
            folder,
            resume=options.resume,
            allow_changes=options.allow_changes,
            doctor=not options.no_doctor,
            progress=progress,
        )
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{done.step} steps done; run directory: {folder}")
    return 0


def _engine(options: argparse.Namespace, folder: Path | None) -> str:
    """The engine that is asked for, or of the run that goes on."""
    from iwopd.config import ConfigError
    from iwopd.runs.directory import RunDirectory

    begun = RunDirectory(folder).engine if options.resume and folder is not None and (folder / "run.json").exists() else "local"
    engine: str = options.engine or begun
    given = {"--nodes": options.nodes, "--gpus-per-node": options.gpus_per_node, "--ray-address": options.ray_address}
    unfit = [name for name, value in given.items() if value is not None] + (["--dry-run"] if options.dry_run else [])
    if engine == "local" and unfit:
        raise ConfigError(f"{unfit[0]} goes with --engine verl")
    return engine


def _run_on_verl(options: argparse.Namespace, config: Config, folder: Path) -> int:
    from iwopd.cluster.verl.launch import dry_run, run_on_verl
    from iwopd.train.progress import pretraining_progress

    if options.dry_run:
        print(dry_run(config, folder, resume=options.resume, address=options.ray_address))
        return 0
    with pretraining_progress() as progress:
        step = run_on_verl(
            config,
            folder,
            resume=options.resume,
            allow_changes=options.allow_changes,
            doctor=not options.no_doctor,
            address=options.ray_address,
            progress=progress,
        )
    print(f"{step} steps done; run directory: {folder}")
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

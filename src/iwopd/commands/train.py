"""Train a student by a recipe (a TOML file). Any setting can be overridden by its dotted name: --optim.lr 1e-4 --method.params
'{gamma = 1.0}', and emptied: --models.world ''. The run directory holds settings, metrics, evaluations, checkpoints.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iwopd.commands.options import named_path, parse_overrides
from iwopd.recipes import find

if TYPE_CHECKING:
    from iwopd.config import Config

HELP = "train a student by a recipe"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help message and exit")
    recipe = "TOML file, or a name of `iwopd recipes`; with --resume also a run directory"
    parser.add_argument("recipe", type=find, help=recipe)
    parser.add_argument("--out", type=named_path, help="run directory (default: runs/<recipe>-seed<seed>)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint of the run directory")
    parser.add_argument("--allow-changes", action="store_true", help="resume although settings or data differ")
    auto = "auto: a short probe, without answers, replaces the [method] section by uniform or survival weights"
    parser.add_argument("--method", choices=("auto",), help=auto)
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
    elif options.resume and not recipe.is_file():
        why = "is not a run directory: it has no run.json" if recipe.exists() else "does not exist"
        raise ConfigError(f"there is no run to resume: {recipe} {why}; {_runs_beside(recipe)}start it with a recipe and --out")
    on_verl = _engine(options, folder) == "verl"
    _check_auto(options, overrides, on_verl=on_verl)
    for name in ("nodes", "gpus_per_node"):
        if getattr(options, name) is not None:
            overrides[f"cluster.{name}"] = getattr(options, name)
    config = load_config(recipe, overrides, saved=saved)
    folder = folder or Path("runs") / f"{recipe.stem}-seed{config.seed}"
    about: dict[str, Any] = {}

    how = {"resume": options.resume, "allow_changes": options.allow_changes, "doctor": not options.no_doctor}
    if on_verl:
        from iwopd.cluster.plan import memory_warnings
        from iwopd.cluster.verl.launch import dry_run, dry_run_notes, run_on_verl
        from iwopd.train.progress import pretraining_progress

        if options.dry_run:
            print(dry_run(config, folder, resume=options.resume, address=options.ray_address))
            _say(*dry_run_notes(config, folder, options.ray_address), *memory_warnings(config))
            return 0
        _say(*memory_warnings(config))
        with pretraining_progress() as progress:
            step = run_on_verl(config, folder, address=options.ray_address, progress=progress, **how)
    else:
        _announce(config, folder, recipe)
        from iwopd.train.run import run_training

        if options.method == "auto" or options.resume:
            config, about = _advised(options, config, folder, overrides)
        step = run_training(config, folder, about=about, **how).step
    if is_first():
        from iwopd.train.headline import ending

        print(f"{step} steps done; run directory: {folder}", *ending(folder), sep="\n")
    return 0


def is_first() -> bool:
    """Of several processes."""
    return os.environ.get("RANK", "0") == "0"


def _announce(config: Config, folder: Path, recipe: Path) -> None:
    """Before the libraries are loaded, which takes seconds; what follows is the display's."""
    if config.tracking.console != "off" and is_first():
        lines = ("run", folder), ("recipe", recipe), ("loading", "torch, transformers")
        print(*(f"{name:<9}{text}" for name, text in lines), sep="\n", file=sys.stderr, flush=True)


def _say(*remarks: str) -> None:
    """On stderr: what is printed stays a command."""
    for remark in remarks:
        print(f"iwopd: {remark}", file=sys.stderr, flush=True)


def _runs_beside(path: Path) -> str:
    """The run directories that lie where this one was looked for."""
    try:
        names = sorted(str(one.parent) for one in path.parent.glob("*/run.json"))
    except OSError:
        names = []
    return f"runs there: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; or " if names else ""


def _check_auto(options: argparse.Namespace, overrides: dict[str, Any], *, on_verl: bool) -> None:
    """Refuse --method auto where it makes no sense, before anything is read."""
    from iwopd.config import ConfigError

    if options.method != "auto":
        return
    if on_verl:
        raise ConfigError(
            "--method auto probes with the local trainer, and --engine verl trains elsewhere: run `iwopd probe` on the pair, "
            "and name a method in the recipe"
        )
    if given := [name for name in overrides if name.partition(".")[0] == "method"]:
        raise ConfigError(
            f"--method auto chooses the [method] section, and --{given[0]} is a part of it: leave one of them out"
        )


def _advised(
    options: argparse.Namespace, config: Config, folder: Path, overrides: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """The settings with the method of a short probe, and what `run.json` keeps of it; a resumed run keeps its advice."""
    from iwopd.config import ConfigError
    from iwopd.runs.directory import RunDirectory

    run = RunDirectory(folder)
    if not options.resume:
        from iwopd.analysis.advice import advised
        from iwopd.train.progress import pretraining_progress

        run.check_free()  # before the probe, not after it
        with pretraining_progress() as progress:
            config, advice = advised(config, print, progress)
        return config, {"method_advice": advice}
    kept = run.about().get("method_advice") if (folder / "run.json").exists() else None
    if kept is None and options.method == "auto":
        raise ConfigError(f"{folder} was not started with --method auto: continue it with --resume alone")
    by_hand = any(name.startswith("method.") for name in overrides)
    return config if kept is None or by_hand else config.model_copy(update={"method": run.config().method}), {}


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

"""Options that several commands share. Nothing heavy is imported here: `iwopd --help` reads this module."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def picked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These options as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How models are loaded: `eval`, `probe` and `serve-teacher`."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ... (default: cpu)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that a repository brings along")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments."""
    return picked(options, "dtype", "device", "trust_remote_code")


def add_report_sources(parser: argparse.ArgumentParser) -> None:
    """What is shown: `report` and `figures`."""
    what = "run directory, probe (folder or probe.json), or a folder of them"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_OR_PROBE", help=what)
    parser.add_argument("--probe", type=Path, action="append", default=[], metavar="PROBE", help="probe; may be repeated")
    parser.add_argument("--handoff", type=Path, help="hand-off curve (default: handoff.json beside the runs)")


def words(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_overrides(rest: Sequence[str]) -> dict[str, Any]:
    """`--optim.lr 1e-4` and `--optim.lr=1e-4`, in any number: `train`, `doctor` and `plan`."""
    from iwopd.config import ConfigError, parse_value

    overrides: dict[str, Any] = {}
    remaining = iter(rest)
    for word in remaining:
        if not word.startswith("--"):
            raise ConfigError(f"do not know what to do with {word!r}; settings look like --optim.lr 1e-4")
        name, given, text = word[2:].partition("=")
        if not given:
            text = next(remaining, "")
            if not text or text.startswith("--"):
                raise ConfigError(f"--{name} needs a value, e.g. --{name} 1")
        overrides[_setting(name)] = parse_value(text)
    return overrides


USERS_KEYS = ("eval.data", "teacher.others", "engine")
"""Tables whose keys a user or a plug-in chooses: tasks, teachers, engines."""


def _setting(name: str) -> str:
    """The name of a setting, in which `-` may stand for `_`; a key that a user chose stays as written."""
    plain, written = name.replace("-", "_"), name.split(".")
    parts = plain.split(".")
    for table in USERS_KEYS:
        if plain.startswith(f"{table}."):
            place = table.count(".") + 1
            parts[place] = written[place]
    return ".".join(parts)

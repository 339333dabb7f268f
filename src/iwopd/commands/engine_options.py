"""`--engine` and `--engine-option`, for every command that samples."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iwopd.rollout.engine import EngineChoice


def add_engine_options(parser: argparse.ArgumentParser, who: str = "") -> None:
    """`who` is put before the names: `teacher` gives `--teacher-engine`."""
    name, of = (f"--{who}-engine", f" for the {who}") if who else ("--engine", "")
    engine = f"who writes{of}: local, vllm, server, or a plug-in's (default: local)"
    setting = f"a setting of {name}, e.g. url=http://gpu1:8000 (docs/vllm.md); may be repeated"
    parser.add_argument(name, default="local", metavar="NAME", help=engine)
    parser.add_argument(f"{name}-option", action="append", default=[], metavar="NAME=VALUE", help=setting)


def engine_choice(options: argparse.Namespace, who: str = "") -> EngineChoice:
    """The engine that was asked for."""
    from iwopd.config import ConfigError, make_engine_choice, parse_value

    prefix = f"{who}_engine" if who else "engine"
    option = f"--{prefix.replace('_', '-')}-option"
    values = {}
    for word in getattr(options, f"{prefix}_option"):
        name, given, text = word.partition("=")
        if not given:
            raise ConfigError(f"{option} {word!r} should look like {option} url=http://gpu1:8000")
        values[name.replace("-", "_")] = parse_value(text)
    return make_engine_choice(getattr(options, prefix), values, where=option)

"""Options that several commands share. Nothing heavy is imported here: `iwopd --help` reads this module."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iwopd.data.chat import Rendering


def named_path(text: str) -> Path:
    """A path as it was written. An empty one, as an unset variable of a shell leaves it, would be the folder one is in."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: name a file or folder ('.' is the one you are in)")
    return Path(text)


def picked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These options as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How models are loaded: `eval`, `probe` and `serve-teacher`."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ... (default: cpu)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that a repository brings along")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments; a device that is not here is refused before anything is loaded."""
    from iwopd.devices import check_device

    check_device(options.device, "--device")
    return picked(options, "dtype", "device", "trust_remote_code")


CHAT_OPTIONS = ("thinking", "chat_template", "chat_template_kwargs", "prefill")
CHAT_NAMES = tuple(f"--{name.replace('_', '-')}" for name in CHAT_OPTIONS)


def add_chat_options(parser: argparse.ArgumentParser, default: str = "") -> None:
    """How prompts are rendered: `eval` and `probe`."""
    switch: Any = argparse.BooleanOptionalAction
    mode = f"thinking mode of the chat template (default: {default}off)"
    parser.add_argument("--thinking", action=switch, default=None, help=mode)
    own = "file with a Jinja chat template instead of the tokenizer's"
    parser.add_argument("--chat-template", metavar="FILE", help=own)
    names = "what the template is given, e.g. '{reasoning_effort = \"low\"}'"
    parser.add_argument("--chat-template-kwargs", metavar="TABLE", help=names)
    parser.add_argument("--prefill", metavar="TEXT", help="beginning of every answer: it ends the prompts")


def rendering(options: argparse.Namespace, base: Rendering | None = None) -> Rendering:
    """The rendering that is asked for; what is not said is as in `base`."""
    from dataclasses import replace

    from iwopd.config import ConfigError, parse_value
    from iwopd.config.templates import check_kwargs
    from iwopd.data.chat import THINKING, WITHOUT_THINKING
    from iwopd.data.templates import TemplateError, read_template

    found = base or WITHOUT_THINKING
    try:
        if options.chat_template is not None:
            found = replace(found, template=read_template(options.chat_template))
    except TemplateError as error:
        raise ConfigError(f"--chat-template: {error}") from None
    if options.chat_template_kwargs is not None:
        try:
            found = found.but(check_kwargs(parse_value(options.chat_template_kwargs)))
        except ValueError as error:
            raise ConfigError(f"--chat-template-kwargs {options.chat_template_kwargs!r}: {error}") from None
    if options.thinking is not None:
        found = found.but({THINKING: options.thinking})
    return found if options.prefill is None else replace(found, prefill=options.prefill)


def add_report_sources(parser: argparse.ArgumentParser) -> None:
    """What is shown: `report` and `figures`."""
    what = "run directory, probe (folder or probe.json), or a folder of them"
    parser.add_argument("runs", nargs="+", type=named_path, metavar="RUN_OR_PROBE", help=what)
    parser.add_argument("--probe", type=named_path, action="append", default=[], metavar="PROBE", help="probe; may be repeated")
    parser.add_argument("--handoff", type=named_path, help="hand-off curve (default: handoff.json beside the runs)")


def check_report_sources(options: argparse.Namespace) -> None:
    """What is named by an option must be there; of runs the page itself says what is missing."""
    from iwopd.report import ReportError

    for name, path in [*(("--probe", path) for path in options.probe), ("--handoff", options.handoff)]:
        if path is not None and not path.exists():
            raise ReportError(f"{name} {path}: there is no such file; correct it, or leave it out")


def words(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_overrides(rest: Sequence[str]) -> dict[str, Any]:
    """`--optim.lr 1e-4` and `--optim.lr=1e-4`, in any number; `--models.world ''` empties one: `train`, `doctor`, `plan`."""
    from iwopd.config import ConfigError, parse_setting

    overrides: dict[str, Any] = {}
    remaining = iter(rest)
    for word in remaining:
        if not word.startswith("--"):
            raise ConfigError(f"do not know what to do with {word!r}; settings look like --optim.lr 1e-4")
        name, given, value = word[2:].partition("=")
        text = value if given else next(remaining, None)
        if text is None or (not given and text.startswith("--")):
            raise ConfigError(f"--{name} needs a value, e.g. --{name} 1; --{name} '' empties it")
        overrides[_setting(name)] = parse_setting(_setting(name), text)
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

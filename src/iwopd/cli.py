"""The command line: thin commands, and one clear line for every failure that the user can do something about."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import iwopd
from iwopd.commands import (
    check_code,
    check_math,
    compare,
    demo,
    doctor,
    evaluate,
    export,
    figures,
    methods,
    plan,
    probe,
    report,
    reproduce,
    serve_teacher,
    train,
)
from iwopd.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("train", "doctor", "plan"):
        parser.error(f"unknown argument {rest[0]!r}; see `iwopd {options.command} --help`")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        code = options.run(options, rest)
    except KeyboardInterrupt:
        print("iwopd: interrupted", file=sys.stderr)
        code = 130
    except UserError as error:
        print(f"iwopd: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="iwopd",
        description="Importance-weighted on-policy distillation. Start with `iwopd demo`: it needs no download and no GPU.",
    )
    parser.add_argument("--version", action="version", version=f"iwopd {iwopd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (
        demo,
        train,
        doctor,
        plan,
        evaluate,
        compare,
        probe,
        report,
        figures,
        export,
        reproduce,
        serve_teacher,
        check_math,
        check_code,
        methods,
    ):
        command.add(commands)
    return parser


if __name__ == "__main__":
    main()

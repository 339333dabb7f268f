"""The command line: thin commands, and one clear line for every failure that the user can do something about.

Little is imported before `main` runs, so that Ctrl-C has an answer from the beginning.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Any

from iwopd.errors import UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

COMMANDS = (
    *("demo", "train", "doctor", "plan", "eval", "compare", "probe", "report", "runs", "figures", "export", "reproduce"),
    *("serve-teacher", "check-math", "check-code", "methods", "recipes"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        parser = _parser()
        options, rest = parser.parse_known_args(arguments)
        if rest and options.command not in ("train", "doctor", "plan"):
            parser.error(f"unknown argument {rest[0]!r}; see `iwopd {options.command} --help`")
        code = options.run(options, rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("iwopd: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except UserError as error:
        print(f"iwopd: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is None:
            raise
        remedy = "give yourself access, make room, or name another place"
        print(f"iwopd: {error.filename}: {error.strerror}; {remedy}", file=sys.stderr)
        code = UserError.exit_code
    sys.exit(code)


DISK_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT),
)
"""What a disk may say to any command; where more is known, it is said before."""


def _parser() -> argparse.ArgumentParser:
    import argparse

    import iwopd

    parser = argparse.ArgumentParser(
        prog="iwopd",
        description="Importance-weighted on-policy distillation. Start with `iwopd demo`: it needs no download and no GPU.",
    )
    parser.add_argument("--version", action="version", version=f"iwopd {iwopd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        add_command(commands, name)
    return parser


def add_command(commands: Any, name: str) -> None:
    """Add the command that a module of `iwopd.commands` describes: its docstring, `HELP`, perhaps `EPILOG`, `add` and `run`."""
    import argparse
    import importlib

    module = importlib.import_module(f"iwopd.commands.{'evaluate' if name == 'eval' else name.replace('-', '_')}")
    epilog = getattr(module, "EPILOG", None)
    texts = {"help": module.HELP, "description": module.__doc__, "epilog": epilog}
    parser = commands.add_parser(name, **texts, add_help=name != "train")  # which has its own
    if "\n\n" in f"{module.__doc__}{epilog}":  # laid out by hand
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add(parser)
    parser.set_defaults(run=module.run)


if __name__ == "__main__":
    main()

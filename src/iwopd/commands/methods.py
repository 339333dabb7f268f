"""`iwopd methods`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("methods", help="list every method and weight rule with formula and parameters")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.methods_table import print_methods

    print_methods()
    return 0

"""List every method, objective and weight rule with formula and parameters."""

from __future__ import annotations

import argparse
import json
from typing import Any

HELP = "list every method, objective and weight rule with formula and parameters"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.methods import catalogue

    found = catalogue()
    if options.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        _show(found)
    return 0


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(emoji=False)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    table = Table(title="Methods (recipes/tiny/NAME.toml)", title_justify="left")
    for column in ("name", "in the paper", "[method] section"):
        table.add_column(column, overflow="fold")
    for method in found["methods"]:
        table.add_row(method["name"], method["title"], _toml(method["method"]) or "the defaults")
    console.print(table, markup=False)
    headings = {
        "objectives": "Objectives (method.objective); their parameters are settings of [method]",
        "advantages": "Advantages (method.advantage) of policy-gradient; their parameters are settings of [method]",
        "rules": "Weight rules (method.weights), a[t] = lp_T[t] - lp_0[t]; their parameters are method.params.\n"
        "Every rule also takes normalize = 'mean-one'",
    }
    for kind, heading in headings.items():
        say(f"\n{heading}")
        for one in found[kind]:
            if "error" in one:
                say(f"\n  {one['name']}: {one['error']}", style="red")
                continue
            say(f"\n  {one['name']}", style="bold")
            say(f"    {one['formula']}\n    from: {one['source']}\n    parameters: {_toml(one['params']) or 'none'}")
            say(f"    needs: {', '.join(one['needs']) or 'nothing but the length'}")


def _toml(values: dict[str, Any]) -> str:
    """As a recipe writes it; None, which TOML lacks, stands for a setting that is left out."""
    return ", ".join(f"{name} = {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + _toml(value) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return "(left out)" if value is None else repr(value)

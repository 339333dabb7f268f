"""List every method, objective, weight rule and horizon with formula and parameters."""

from __future__ import annotations

import argparse
import json
from typing import Any

HELP = "list every method, objective, weight rule and horizon with formula and parameters"


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


HEADINGS = {
    "objectives": "Objectives (method.objective); their parameters are settings of [method]",
    "advantages": "Advantages (method.advantage) of policy-gradient; their parameters are settings of [method]",
    "rules": "Weight rules (method.weights), a[t] = lp_T[t] - lp_0[t]; their parameters are method.params.\n"
    "Every rule also takes normalize = 'mean-one'",
    "horizons": "Horizons (rollout.horizon.type): how far answers are written in training; their parameters are settings of\n"
    "[rollout.horizon]",
}


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(emoji=False)

    def say(text: str, style: str = "", indent: int = 0) -> None:
        """Lines that are too long go on under their beginning."""
        for line in text.splitlines():
            console.print(Padding(Text(line, style=style), (0, 0, 0, indent), expand=False))

    table = Table(title="Methods (iwopd train tiny/NAME)", title_justify="left")
    for column in ("name", "what it is", "[method] section"):
        table.add_column(column, overflow="fold")
    for method in found["methods"]:
        table.add_row(method["name"], method["title"], _toml(method["method"], "\n") or "# the defaults")
    console.print(table, markup=False)
    for kind, heading in HEADINGS.items():
        console.print()
        say(heading)
        for one in found[kind]:
            console.print()
            if "error" in one:
                say(f"{one['name']}: {one['error']}", style="red", indent=2)
                continue
            say(one["name"], style="bold", indent=2)
            say(f"{one['formula']}\nfrom: {one['source']}\nparameters: {_params(one)}\n{_needs(one)}", indent=4)
    console.print()
    say("Evidence beside the log-probs of the written tokens: computed only where a method asks for it")
    for one in found["evidence"]:
        if one["beside_logprobs"]:
            say(f"{one['name']}: {one['what']}", indent=2)


def _params(one: dict[str, Any]) -> str:
    needed = [f"{name} (needed)" for name in one.get("required", ())]
    return ", ".join(filter(None, [*needed, _toml(one["params"])])) or "none"


def _needs(one: dict[str, Any]) -> str:
    if "stops_online" in one:
        return f"needs: {'a teacher that scores answers while they are written' if one['stops_online'] else 'nothing'}"
    plain = [name for name in one["needs"] if name not in one["beside_logprobs"]]
    further = f"beside log-probs: {', '.join(one['beside_logprobs'])}" if one["beside_logprobs"] else ""
    return f"needs: {'; '.join(filter(None, [', '.join(plain), further])) or 'nothing but the length'}"


def _toml(values: dict[str, Any], between: str = ", ") -> str:
    """As a recipe writes it; None, which TOML lacks, stands for a setting that is left out."""
    return between.join(f"{name} = {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + _toml(value) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float) and len(repr(value)) > 8:
        return f"{value:.4g}"
    return "(left out)" if value is None else json.dumps(value, ensure_ascii=False)

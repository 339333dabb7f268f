"""What `iwopd methods` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from iwopd.algo import WEIGHT_RULES
from iwopd.methods import METHODS, TITLES

ADVANTAGES = {
    "opd": "lp_T - lp_0",
    "exopd": "scale * w * (lp_T - lp_R) - (lp_0 - lp_R)   (weights inside)",
}


def print_methods(console: Console | None = None) -> None:
    console = console or Console()
    table = Table(title="Methods (recipes/tiny/NAME.toml)", title_justify="left")
    for column in ("name", "in the paper", "[method] section"):
        table.add_column(column, overflow="fold")
    for name, section in METHODS.items():
        shown = ", ".join(f"{key} = {value!r}" for key, value in section.items()) or "the defaults"
        table.add_row(name, TITLES[name], shown)
    console.print(table, markup=False)
    console.print("\nAdvantages (method.advantage)", markup=False)
    for name, formula in ADVANTAGES.items():
        console.print(f"  {name:<8} A[t] = {formula}", markup=False, highlight=False)
    console.print("\nWeight rules (method.weights): a[t] = lp_T[t] - lp_0[t]", markup=False)
    for name in WEIGHT_RULES:
        try:
            rule = WEIGHT_RULES[name]
        except (ImportError, TypeError) as error:
            console.print(f"\n  {name}: {error}", style="red", markup=False)
            continue
        params = ", ".join(f"{key} = {value!r}" for key, value in rule.params.items())
        console.print(f"\n  {name}", style="bold", markup=False)
        console.print(f"    w[t] = {rule.formula}", markup=False, highlight=False)
        console.print(f"    from: {rule.source}", markup=False, highlight=False)
        console.print(
            f"    parameters: {params or 'none'}; every rule: normalize = None or 'mean-one'", markup=False, highlight=False
        )

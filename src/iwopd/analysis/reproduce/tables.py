"""Tables of a reproduction: plain data, printed or written as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from iwopd.analysis.reproduce.effects import Effect
from iwopd.eval.statistics import LEAST_UNITS, Interval


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class ItemSection:
    """What the paper shows of one of its phenomena, what ours shows, and the numbers for machines and figures."""

    key: str
    title: str
    paper: str
    tables: Sequence[Table]
    words: Sequence[str]
    """What ours shows, in sentences made from the numbers."""
    numbers: dict[str, Any] = field(default_factory=dict)


NOT_RUN = "not run"
TOO_FEW = "too few to tell"


def show(interval: Interval) -> str:
    """A mean with its interval, if it has one."""
    if math.isnan(interval.mean):
        return NOT_RUN
    return f"{interval.mean:.1f}" if math.isnan(interval.low) else f"{interval:.1f}"


def mean_alone(interval: Interval) -> str:
    return NOT_RUN if math.isnan(interval.mean) else f"{interval.mean:.1f}"


def signed(effect: Effect) -> str:
    if not effect.units:
        return NOT_RUN
    return f"{effect.interval:+.1f}" if effect.enough else f"{effect.interval.mean:+.1f}, {TOO_FEW}"


def p(effect: Effect) -> str:
    """Holm's; empty where there is no verdict."""
    if not effect.enough:
        return ""
    return "< 0.001" if effect.holm < 0.001 else f"{effect.holm:.3f}"


def established(effect: Effect) -> bool:
    """Whether Holm's p is below 0.05, over lineages enough."""
    return effect.established


def verdict(effect: Effect) -> str:
    if effect.established:
        return "established" if effect.interval.mean > 0 else "established, lower"
    if effect.alone:
        return f"not established after Holm's correction over {effect.comparisons} comparisons"
    return "not distinguishable from zero"


def in_words(what: str, effect: Effect, says: str | None = None) -> str:
    """A sentence with its verdict (or what else it says), if there are lineages enough for one; nothing if nothing was run."""
    if not effect.units:
        return ""
    over = f"over {effect.units} lineage{'s' if effect.units > 1 else ''}"
    if not effect.enough:
        return f"{what}: {effect.interval.mean:+.1f} points {over}: {TOO_FEW}, a verdict takes {LEAST_UNITS}."
    whose = "p" if effect.comparisons == 1 else f"Holm's p of {effect.comparisons}"
    return f"{what}: {signed(effect)} points {over} ({whose} {p(effect)}): {says or verdict(effect)}."


def print_section(section: ItemSection, console: Console) -> None:
    console.print(f"\n{section.key.upper()}  {section.title}", style="bold", highlight=False)
    console.print(f"paper: {section.paper}", highlight=False, style="dim")
    for table in section.tables:
        shown = RichTable()
        for place, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if place == 0 else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, markup=False)
    for line in section.words:
        console.print(line, highlight=False, markup=False)


def markdown(section: ItemSection) -> str:
    lines = [f"### {section.key.upper()}: {section.title}", "", f"*Paper: {section.paper}*", ""]
    for table in section.tables:
        ruler = ["---", *["---:"] * (len(table.columns) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in (table.columns, ruler, *table.rows)] + [""]
    return "\n".join([*lines, *section.words, ""])

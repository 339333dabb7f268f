"""Tables of a reproduction: plain data, printed or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from iwopd.analysis.reproduce.runs import Effect
from iwopd.eval.statistics import Interval


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


def show(interval: Interval) -> str:
    return f"{interval:.1f}"


def signed(effect: Effect) -> str:
    return f"{effect.interval:+.1f}"


def p(effect: Effect) -> str:
    return "< 0.001" if effect.p_value < 0.001 else f"{effect.p_value:.3f}"


def established(effect: Effect) -> bool:
    """Whether the 95 % interval leaves zero out."""
    return effect.interval.low > 0 or effect.interval.high < 0


def in_words(what: str, effect: Effect) -> str:
    verdict = "not distinguishable from zero"
    if established(effect):
        verdict = "established" if effect.interval.mean > 0 else "established, the other way round"
    return f"{what}: {signed(effect)} points over {effect.runs} runs (p {p(effect)}): {verdict}."


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

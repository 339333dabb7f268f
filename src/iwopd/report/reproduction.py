"""Figures of `iwopd reproduce`: learning curves of every item, means over lineages. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from iwopd.analysis.reproduce.tables import ItemSection
from iwopd.report.charts import Axis, Chart
from iwopd.report.paper import write_chart
from iwopd.report.series import interval_series

MOST = 12
"""Curves that can be told apart, by colour, dash and marker together."""


def learning_chart(section: ItemSection) -> Chart | None:
    """Accuracy by step of every method of a section; None if it has none."""
    methods = section.numbers.get("methods")
    if not methods:
        return None
    shown = section.numbers.get("shown") or list(methods)
    run = [title for title in shown if not math.isnan(methods[title]["accuracy"][0].mean)]
    curves = {title: dict(sorted(methods[title]["accuracy"].items())) for title in run[:MOST]}
    series = tuple(interval_series(title, style, curve) for style, (title, curve) in enumerate(curves.items()))
    band = "95 % intervals over lineages"
    axes = Axis("step"), Axis("right answers", percent=True)
    return Chart(section.key, section.title, *axes, series, "", band=band, markers=True, by="own")


def agreement_chart(section: ItemSection) -> Chart | None:
    """How well the gradients before and after drifts agree, by step; None if the section does not say."""
    curves = section.numbers.get("agreement")
    if not curves:
        return None
    series = tuple(interval_series(title, style, curve) for style, (title, curve) in enumerate(curves.items()))
    axes = Axis("step"), Axis("cosine of the two gradients")
    title = "agreement of gradients before and after drifts"
    return Chart(f"{section.key}-agreement", title, *axes, series, "", band="95 % intervals over lineages", by="own")


def write_figures(sections: Sequence[ItemSection], folder: Path) -> list[Path]:
    """`<item>.svg` of every section that has curves, and `<item>-agreement.svg` where gradients were compared."""
    found = [make(section) for section in sections for make in (learning_chart, agreement_chart)]
    return [write_chart(chart, folder / f"{chart.id}.svg") for chart in found if chart is not None]

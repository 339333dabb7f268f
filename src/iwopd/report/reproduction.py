"""Figures of `iwopd reproduce`: learning curves of every item, pooled over lineages and seeds. Needs matplotlib."""

from __future__ import annotations

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
    curves = {title: dict(sorted(methods[title]["accuracy"].items())) for title in shown[:MOST]}
    series = tuple(interval_series(title, style, curve) for style, (title, curve) in enumerate(curves.items()))
    band = "95 % intervals over runs and problems"
    axes = Axis("step"), Axis("right answers", percent=True)
    return Chart(section.key, section.title, *axes, series, "", band=band, markers=True, by="own")


def write_figures(sections: Sequence[ItemSection], folder: Path) -> list[Path]:
    """`<item>.svg` of every section that has curves."""
    charts = [chart for section in sections if (chart := learning_chart(section)) is not None]
    return [write_chart(chart, folder / f"{chart.id}.svg") for chart in charts]

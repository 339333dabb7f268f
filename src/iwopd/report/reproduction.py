"""Figures of `iwopd reproduce`: learning curves of every item, pooled over lineages and seeds. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iwopd.analysis.reproduce.tables import Section
from iwopd.report.charts import Axis, Chart, Series
from iwopd.report.paper import write_chart

MOST = 12
"""Curves that can be told apart, by colour, dash and marker together."""


def learning_chart(section: Section) -> Chart | None:
    """Accuracy by step of every method of a section; None if it has none."""
    methods = section.numbers.get("methods")
    if not methods:
        return None
    shown = section.numbers.get("shown") or list(methods)
    series = []
    for style, title in enumerate(shown[:MOST]):
        cells = methods[title]
        steps = sorted(cells["accuracy"])
        points = [cells["accuracy"][step] for step in steps]
        mean, low, high = ([getattr(point, name) for point in points] for name in ("mean", "low", "high"))
        series.append(Series(title, style, steps, mean, low, high))
    band = "95 % intervals over runs and problems"
    axes = Axis("step"), Axis("right answers", percent=True)
    return Chart(section.key, section.title, *axes, tuple(series), "", band=band, markers=True, by="own")


def write_figures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """`<item>.svg` of every section that has curves."""
    charts = [chart for section in sections if (chart := learning_chart(section)) is not None]
    return [write_chart(chart, folder / f"{chart.id}.svg") for chart in charts]

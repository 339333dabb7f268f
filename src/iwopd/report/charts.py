"""Charts and panels as data: drawn with plotly.js on the page (`assets/charts.js`), with matplotlib for print (`paper`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Values = Sequence[float | None]
By = Literal["method", "probe", "own"]

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b5488a", "#8a6d00", "#3a3f47", "#3d9bd9", "#7b4fc9")
"""Colours of Okabe and Ito, darkened where they would be faint as lines on white. Style i has colour i modulo 8."""
DARK = ("#56b4e9", "#ff9a4d", "#3fd0a2", "#f09ac8", "#e6c229", "#d5d9e0", "#9bd3ff", "#c3a6ff")
"""The same hues on a dark page."""
NEUTRAL = -1
"""The style of a curve that belongs to no method."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
DASH_ORDER = (0, 1, 2, 3, 4, 5, 1, 2)
"""Of the eight colours: the two blues, 0 and 6, are never both solid."""
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
"""Told apart by dash and marker as well, so that colour is never the only sign."""


@dataclass(frozen=True)
class Series:
    """A line, with a band around it if `low` and `high` are given; in a chart of dots, a dot with an interval a row."""

    label: str
    style: int
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None
    dash: int | None = None
    """Index into the dashes, where it is not the style's: the second of two curves in one colour. Without markers."""
    legend: bool = True
    """Named in the chart's own legend; else the caption says what it is."""


@dataclass(frozen=True)
class Axis:
    title: str
    percent: bool = False
    """Values are percentages: the ticks say so."""
    zero: bool = False
    """The axis starts at zero."""
    range: tuple[float, float] | None = None
    tick: float | None = None
    """Distance of two ticks, where it is ours to choose."""


ALONG = Axis("part of the answer", percent=True, range=(0, 100))


@dataclass(frozen=True)
class Chart:
    """What to draw, and the words under it."""

    id: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    caption: str
    band: str = ""
    """What the bands are, for the caption; empty if there are none."""
    markers: bool = False
    kind: Literal["lines", "stack", "dots"] = "lines"
    """`stack`: a horizontal bar for every label of `bars`, made of the series' values. `dots`: a row for every label of `bars`,
    with a dot and an interval for every series, filled where the interval leaves zero out (`stands`)."""
    bars: tuple[str, ...] = ()
    lines: tuple[tuple[str, float], ...] = ()
    """Reference lines: label and height (in a chart of dots: its place on the horizontal axis)."""
    by: By = "method"
    """What the styles stand for: the page's methods or its probes, which the reader can hide in all charts, or something of
    this chart's own, which then has a legend."""

    @property
    def keys(self) -> tuple[Series, ...]:
        """What the chart's own legend names."""
        named = tuple(one for one in self.series if one.legend)
        return named if self.by == "own" and self.kind == "lines" and len(named) > 1 else ()

    def as_json(self) -> dict[str, Any]:
        """For the page; numbers to five significant digits, which is more than a screen shows."""
        return {
            **{name: getattr(self, name) for name in ("id", "title", "kind", "markers", "band", "by")},
            "bars": list(self.bars),
            "lines": [[label, height, self.label_above(height)] for label, height in self.lines],
            "x": asdict(self.x),
            "y": asdict(self.y),
            "series": [self._series_json(turn, one) for turn, one in enumerate(self.series)],
        }

    def label_above(self, height: float) -> bool:
        """Whether the label of a reference line stands above it: away from the nearer end of the axis."""
        values = [value for one in self.series for value in one.y if value is not None]
        low, high = self.y.range or (min(0.0, *values, height), max(0.0, *values, height))
        return height < (low + high) / 2

    def filled(self, series: Series, place: int) -> bool:
        """Whether a dot is filled: shares cannot be below zero, so for them zero is no question."""
        return self.x.percent or stands(series, place)

    def _series_json(self, turn: int, one: Series) -> dict[str, Any]:
        names = {name: getattr(one, name) for name in ("label", "style", "dash", "legend")}
        names["line"] = dash_of(one.style, one.dash)
        numbers = {name: _short(getattr(one, name)) for name in ("x", "y", "low", "high")}
        if self.kind != "dots":
            return names | numbers
        filled = [self.filled(one, place) for place in range(len(one.y))]
        return {**names, **numbers, "filled": filled, "offset": row_offset(turn, len(self.series))}


@dataclass(frozen=True)
class Panel:
    """One section of the page."""

    id: str
    """Its anchor: letters and hyphens."""
    title: str
    lead: str
    """The question it answers, in a sentence or two."""
    charts: tuple[Chart, ...] = ()
    template: str = "charts.html.j2"
    context: dict[str, Any] = field(default_factory=dict)
    """For its template."""
    data: dict[str, Any] | None = None
    """JSON for its script, as `<script type="application/json" id="data-ID">`."""
    boxed: bool = False
    """Set apart from the other sections, as a note."""


def dash_of(style: int, own: int | None = None) -> str:
    """The dash of a style, or the one that a series asks for: no two of sixteen styles have colour and dash in common."""
    if own is not None:
        return DASHES[own % len(DASHES)]
    cycle, place = divmod(max(0, style), len(LIGHT))
    return DASHES[(DASH_ORDER[place] + 3 * cycle) % len(DASHES)]


def full_axis(title: str, values: Sequence[float], **more: Any) -> Axis:
    """An axis from zero, or from below it, whose outer ticks enclose all values."""
    low, high = min([0.0, *values]), max([0.0, *values])
    rough = (high - low) / 5 or 0.25
    scale = 10.0 ** math.floor(math.log10(rough))
    tick = next(scale * step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if scale * step >= rough * 0.999)
    low, high = (tick * turn(value / tick - off) for value, turn, off in ((low, math.floor, -1e-9), (high, math.ceil, 1e-9)))
    return Axis(title, range=(low, high if high > low else low + tick), tick=tick, **more)


def chart_panel(name: str, title: str, lead: str, charts: Sequence[Chart]) -> Panel | None:
    """A section of charts; None without a chart."""
    return Panel(name, title, lead, tuple(charts)) if charts else None


def stands(series: Series, place: int) -> bool:
    """Whether an interval leaves zero out; without an interval nobody knows."""
    low, high = (None if ends is None else ends[place] for ends in (series.low, series.high))
    return low is not None and high is not None and (low > 0 or high < 0)


def row_offset(turn: int, count: int) -> float:
    """Where in its row the dot of one of `count` series is, in rows."""
    return (turn - (count - 1) / 2) * min(0.24, 0.72 / count)


def _short(values: Values | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if value is None or not math.isfinite(value) else float(f"{value:.5g}") for value in values]

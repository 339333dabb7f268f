"""A chart as data: drawn with plotly.js on the page (`assets/charts.js`), with matplotlib for print (`paper`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Values = Sequence[float | None]

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b5488a", "#8a6d00", "#3a3f47", "#3d9bd9", "#7b4fc9")
"""Colours of Okabe and Ito, darkened where they would be faint as lines on white. Style i has colour i modulo 8."""
DARK = ("#56b4e9", "#ff9a4d", "#3fd0a2", "#f09ac8", "#e6c229", "#d5d9e0", "#9bd3ff", "#c3a6ff")
"""The same hues on a dark page."""
NEUTRAL = -1
"""The style of a curve that belongs to no method."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
"""Told apart by dash and marker as well, so that colour is never the only sign."""


@dataclass(frozen=True)
class Series:
    """A line, with a band around it if `low` and `high` are given."""

    label: str
    style: int
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Axis:
    title: str
    percent: bool = False
    """Values are percentages: the ticks say so."""
    zero: bool = False
    """The axis starts at zero."""
    range: tuple[float, float] | None = None


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
    """What the bands are, for the caption; empty: there are none."""
    markers: bool = False
    kind: Literal["lines", "stack"] = "lines"
    """`stack`: a horizontal bar for every label of `bars`, made of the series' values."""
    bars: tuple[str, ...] = ()
    lines: tuple[tuple[str, float], ...] = ()
    """Horizontal reference lines: label and height."""

    def as_json(self) -> dict[str, Any]:
        """For the page; numbers to five significant digits, which is more than a screen shows."""
        return {
            "id": self.id,
            "title": self.title,
            "kind": self.kind,
            "markers": self.markers,
            "band": self.band,
            "bars": list(self.bars),
            "lines": [list(line) for line in self.lines],
            "x": asdict(self.x),
            "y": asdict(self.y),
            "series": [
                {
                    "label": one.label,
                    "style": one.style,
                    "x": _short(one.x),
                    "y": _short(one.y),
                    "low": None if one.low is None else _short(one.low),
                    "high": None if one.high is None else _short(one.high),
                }
                for one in self.series
            ],
        }


def _short(values: Values) -> list[float | None]:
    return [None if value is None or not math.isfinite(value) else float(f"{value:.5g}") for value in values]

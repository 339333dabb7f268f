"""From probes to series: curves along the answer, estimates as dots, and numbers in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from iwopd.analysis.probe.result import Curve, Estimate
from iwopd.report.charts import ALONG, NEUTRAL, Axis, Chart, Series
from iwopd.report.gathering import ProbeView

PROMPT_BAND = "95 % bootstrap intervals over prompts"
FILLED = "A filled dot: the interval leaves zero out."


def estimate(value: Estimate | None, scale: float = 1.0, digits: int = 0, unit: str = "") -> str:
    """A number with its interval, in words."""
    if value is None or value.mean is None:
        return "?"
    mean = f"{scale * value.mean:.{digits}f}{unit}"
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ({scale * value.low:.{digits}f} to {scale * value.high:.{digits}f})".replace("-", "\u2212")


def middles(edges: Sequence[float], scale: float = 100.0) -> list[float]:
    """Where to draw the K bins of K + 1 edges: relative positions in percent."""
    return [scale * (left + right) / 2 for left, right in pairwise(edges)]


def curve_series(
    label: str, style: int, x: Sequence[float], curve: Curve, scale: float = 1.0, *, dash: int | None = None
) -> Series:
    """A curve with its band; a negative scale turns it upside down."""
    mean, low, high = (_scaled(values, scale) for values in (curve.mean, curve.low, curve.high))
    if scale < 0:
        low, high = high, low
    return Series(label, style, list(x), mean, low, high, dash)


def having(views: Sequence[ProbeView], part: str) -> list[tuple[ProbeView, Any]]:
    """The probes that have measured a part, each with it."""
    return [(view, found) for view in views if (found := getattr(view.probe, part)) is not None]


def along_chart(
    views: Sequence[ProbeView], chart_id: str, title: str, y: Axis, series: Sequence[Series], caption: str, **more: Any
) -> Chart:
    """Curves along the answer, with intervals over prompts."""
    return Chart(chart_id, title, ALONG, y, tuple(series), caption, band=PROMPT_BAND, by=_shown_by(views), **more)


def dots_chart(
    estimates: Mapping[ProbeView, Mapping[str, Estimate | None]],
    chart_id: str,
    title: str,
    axis: Axis,
    label: str,
    caption: str,
    band: str = PROMPT_BAND,
    lines: tuple[tuple[str, float], ...] = (),
) -> Chart:
    """A row for every name, with a dot and an interval for every probe that has an estimate of it."""
    rows = tuple(dict.fromkeys(row for found in estimates.values() for row in found))
    series = []
    for name, style, view in one_each(list(estimates), label):
        values = [estimates[view].get(row) or Estimate(mean=None) for row in rows]
        columns = ([getattr(value, end) for value in values] for end in ("mean", "low", "high"))
        mean, low, high = (_scaled(column, 100.0 if axis.percent else 1.0) for column in columns)
        series.append(Series(name, style, list(range(len(rows))), mean, low, high))
    by = _shown_by(list(estimates))
    return Chart(chart_id, title, axis, Axis(""), tuple(series), caption, band, kind="dots", bars=rows, lines=lines, by=by)


def one_each(views: Sequence[ProbeView], label: str) -> list[tuple[str, int, ProbeView]]:
    """Label and style of each probe's series: named after the probe; a single probe's is named after what it shows."""
    return [(label, NEUTRAL, views[0])] if views[0].alone else [(view.label, view.style, view) for view in views]


def counted(views: Sequence[ProbeView]) -> str:
    """On what it was measured."""
    counts = {view.label: f"{view.probe.rollouts.rollouts} rollouts of {view.probe.rollouts.prompts} prompts" for view in views}
    distinct = set(counts.values())
    return distinct.pop() if len(distinct) == 1 else "; ".join(f"{label}: {count}" for label, count in counts.items())


def _shown_by(views: Sequence[ProbeView]) -> Literal["probe", "own"]:
    """What colours stand for."""
    return "own" if views[0].alone else "probe"


def _scaled(values: Sequence[float | None], scale: float) -> list[float | None]:
    return [None if value is None else scale * value for value in values]

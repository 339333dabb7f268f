"""From probes to series: curves along the answer, estimates as dots, and numbers in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from iwopd.analysis.probe.result import Curve, Estimate
from iwopd.report.charts import NEUTRAL, Axis, Chart, Series
from iwopd.report.gathering import ProbeView

PROMPT_BAND = "95 % bootstrap intervals over prompts"
FILLED = "A filled dot: the interval leaves zero out."
ALONG = Axis("part of the answer", percent=True, range=(0, 100))


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


def times(scale: float, values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else scale * value for value in values]


def curve_series(
    label: str,
    style: int,
    x: Sequence[float],
    curve: Curve,
    scale: float = 1.0,
    *,
    dash: int | None = None,
    legend: bool = True,
) -> Series:
    """A curve with its band; a negative scale turns it upside down."""
    low, high = times(scale, curve.low), times(scale, curve.high)
    if scale < 0:
        low, high = high, low
    return Series(label, style, list(x), times(scale, curve.mean), low, high, dash, legend)


def dot_series(label: str, style: int, values: Sequence[Estimate | None], scale: float = 1.0) -> Series:
    """A dot with an interval for every row."""
    columns = [
        [None if one is None or (value := getattr(one, name)) is None else scale * value for one in values]
        for name in ("mean", "low", "high")
    ]
    mean, low, high = columns
    return Series(label, style, list(range(len(values))), mean, low, high)


def having(views: Sequence[ProbeView], part: str) -> list[tuple[ProbeView, Any]]:
    """The probes that have measured a part, each with it."""
    return [(view, found) for view in views if (found := getattr(view.probe, part)) is not None]


def along_chart(
    views: Sequence[ProbeView], chart_id: str, title: str, y: Axis, series: Sequence[Series], caption: str, **more: Any
) -> Chart:
    """Curves along the answer, with intervals over prompts."""
    return Chart(chart_id, title, ALONG, y, tuple(series), caption, band=PROMPT_BAND, by=shown_by(views), **more)


def dots_chart(
    views: Sequence[ProbeView],
    chart_id: str,
    title: str,
    axis: Axis,
    rows: Sequence[str],
    label: str,
    values: Callable[[ProbeView], Mapping[str, Estimate | None]],
    caption: str,
    band: str = PROMPT_BAND,
    lines: tuple[tuple[str, float], ...] = (),
) -> Chart:
    """A row for every name in `rows`, with a dot and an interval for every probe; `values` gives a probe's estimates by row."""

    def series(label: str, style: int, view: ProbeView) -> Series:
        found = values(view)
        return dot_series(label, style, [found.get(row) for row in rows], 100.0 if axis.percent else 1.0)

    every, by = one_each(views, label, series), shown_by(views)
    return Chart(chart_id, title, axis, Axis(""), every, caption, band=band, kind="dots", bars=tuple(rows), lines=lines, by=by)


def one_each(views: Sequence[ProbeView], label: str, series: Callable[[str, int, ProbeView], Series]) -> tuple[Series, ...]:
    """One series a probe, named after it; a single probe's is named after what it shows."""
    if views[0].alone:
        return (series(label, NEUTRAL, views[0]),)
    return tuple(series(view.label, view.style, view) for view in views)


def shown_by(views: Sequence[ProbeView]) -> Literal["probe", "own"]:
    """What colours stand for."""
    return "own" if views[0].alone else "probe"


def counted(views: Sequence[ProbeView]) -> str:
    """On what it was measured."""
    counts = [f"{view.probe.rollouts.rollouts} rollouts of {view.probe.rollouts.prompts} prompts" for view in views]
    return (
        counts[0] if len(set(counts)) == 1 else "; ".join(f"{view.label}: {n}" for view, n in zip(views, counts, strict=True))
    )

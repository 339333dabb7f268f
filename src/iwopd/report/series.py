"""From runs to series: metrics over steps and over positions, scores with intervals."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from iwopd.eval.statistics import Interval, interval_over_problems
from iwopd.report.charts import Axis, By, Chart, Series
from iwopd.report.gathering import Group, TaskCurve
from iwopd.runs.logs import number
from iwopd.runs.reading import Run

SEED_BAND = "from the lowest to the highest seed"
PROBLEM_BAND = "95 % bootstrap intervals over problems"

ALIKE = 0.8
"""Share of |gap| from which on the curve of lp₀ − lp_T is the same to the eye."""

_intervals: dict[bytes, Interval] = {}


def interval(scores: Tensor) -> Interval:
    """Mean and interval of scores [N, K] in percent; remembered, because `--watch` asks for the same ones again and again."""
    key = score_key(scores)
    if key not in _intervals:
        _intervals[key] = interval_over_problems([scores.mean(1)]).times(100)
    return _intervals[key]


def score_key(scores: Tensor) -> bytes:
    """The same for the same scores."""
    return hashlib.sha256(repr(tuple(scores.shape)).encode() + scores.contiguous().numpy().tobytes()).digest()


def interval_series(label: str, style: int, intervals: Mapping[float, Interval]) -> Series:
    """Means with a band, by their place on the axis."""
    mean, low, high = ([one[place] for one in intervals.values()] for place in range(3))
    return Series(label, style, list(intervals), mean, low, high)


def accuracy_chart(curves: Sequence[TaskCurve], chart_id: str, title: str, caption: str = "", *, by: By = "method") -> Chart:
    """Accuracy in percent at every evaluation, with intervals over problems."""
    series = tuple(
        interval_series(curve.group.label, curve.group.style, {step: interval(curve.scores(step)) for step in curve.steps})
        for curve in curves
    )
    axis = Axis("right answers", percent=True)
    return Chart(chart_id, title, Axis("step"), axis, series, caption, band=PROBLEM_BAND, markers=True, by=by)


def metric_series(group: Group, name: str, scale: float = 1.0) -> Series | None:
    """A metric by step: the mean over the group's seeds, a band from the lowest to the highest; None if nobody recorded it."""
    by_step: dict[int, list[float]] = {}
    for run in group.runs:
        for step, value in zip(*run.column(name), strict=True):
            by_step.setdefault(step, [])
            if value is not None:
                by_step[step].append(scale * value)
    if not any(by_step.values()):
        return None
    steps = sorted(by_step)
    mean = [sum(by_step[step]) / len(by_step[step]) if by_step[step] else None for step in steps]
    if len(group.runs) == 1:
        return Series(group.label, group.style, steps, mean)
    low = [min(by_step[step], default=None) for step in steps]
    high = [max(by_step[step], default=None) for step in steps]
    return Series(group.label, group.style, steps, mean, low, high)


def metric_chart(
    groups: Sequence[Group], metric: str, chart_id: str, title: str, axis: Axis, caption: str = "", *, by: By = "method"
) -> Chart | None:
    """A metric by step, one series per group; None if nobody recorded it."""
    scale = 100.0 if axis.percent else 1.0
    series = tuple(one for group in groups if (one := metric_series(group, metric, scale)) is not None)
    band = SEED_BAND if any(one.low is not None for one in series) else ""
    return Chart(chart_id, title, Axis("step"), axis, series, caption, band=band, by=by) if series else None


def position_series(group: Group, name: str, part: str) -> Series | None:
    """A `position/…` metric over the first or last tenth of the recorded steps."""
    rows = [row for run in group.runs for row in _window(run, name, part)]
    bins = max((len(row) for row in rows), default=0)
    rows = [row for row in rows if len(row) == bins]
    columns = [[value for row in rows if (value := row[place]) is not None] for place in range(bins)]
    if not any(columns):
        return None
    means = [sum(column) / len(column) if column else None for column in columns]
    return Series(group.label, group.style, [100 * (place + 0.5) / bins for place in range(bins)], means)


def window_steps(run: Run, part: str) -> list[int]:
    """The first or last tenth of a run's steps, at least one."""
    steps = [record["step"] for record in run.metrics]
    count = max(1, len(steps) // 10)
    return steps[:count] if part == "first" else steps[-count:]


def _window(run: Run, name: str, part: str) -> list[list[float | None]]:
    wanted = set(window_steps(run, part))
    rows: list[Any] = [record.get(name) for record in run.metrics if record["step"] in wanted]
    return [[number(value) for value in row] for row in rows if isinstance(row, list)]


def signed_share(sizes: Sequence[Series], signed: Sequence[Series]) -> float | None:
    """How much of the mean |gap| is left of the gap with its sign, turned over; None where one of them was not recorded."""
    size, rest = (sum(value for one in part for value in one.y if value is not None) for part in (sizes, signed))
    return rest / size if size > 0 and signed else None


def same_curve(share: float | None) -> str:
    """Why the signed curve is not drawn beside the unsigned one, for its caption; empty where it is another curve."""
    if share is None or share < ALIKE:
        return ""
    return f" With its sign (lp₀ − lp_T, the sampled reverse KL) it is {100 * share:.0f} % of that: the same curve, not drawn."


def all_values(series: Sequence[Series]) -> list[float]:
    """Every number in the series, bands included."""
    columns = [column for one in series for column in (one.y, one.low, one.high) if column is not None]
    return [value for column in columns for value in column if value is not None]

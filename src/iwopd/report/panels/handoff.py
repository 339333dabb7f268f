"""The hand-off curve: the student begins an answer, the teacher finishes it. Measured by the demo, by probes, or by both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iwopd.analysis.probe.result import Handoff
from iwopd.report.charts import NEUTRAL, Axis, Chart, Panel, Series, chart_panel
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.probes import curve_series, having

CAPTION = "It shows how much a prefix costs this teacher; it does not show how much of that a training method can win back."
ALONE = ": student alone"
STUDENT_ALONE = 2
"""Its dash, where several curves share a chart."""


def build(data: ReportData) -> Panel | None:
    return chart_panel("handoff", "Hand-off", _lead(data.compared, data.handoff), charts(data.compared, data.handoff))


def charts(views: Sequence[ProbeView], demo: dict[str, Any] | None = None, suffix: str = "") -> list[Chart]:
    """One chart with all curves (Fig. 1b)."""
    measured = having(views, "handoff")
    several = len(measured) + (demo is not None) > 1
    series: list[Series] = []
    for view, part in measured:
        label = view.label if not view.alone else "probe" if several else "teacher goes on"
        style = NEUTRAL if view.alone and not several else view.style
        series.append(curve_series(label, style, [100 * fraction for fraction in part.fractions], part.teacher, 100.0))
        if part.student is not None and part.student.mean is not None:
            series.append(_level(label, style, 100 * part.student.mean))
    if demo is not None:
        label = f"hand-off file{', world ' + demo['world'] if demo['world'] else ''}" if several else "teacher goes on"
        means, lows, highs = ([interval[place] for _, interval in demo["points"]] for place in range(3))
        series.append(Series(label, NEUTRAL, [100 * share for share, _ in demo["points"]], means, lows, highs))
        if demo["student"]:
            series.append(_level(label, NEUTRAL, demo["student"][0]))
    if not series:
        return []
    alone = [one for one in series if not one.legend]
    problems = [part.problems for _, part in measured] + ([demo["problems"]] if demo and demo["problems"] else [])
    counts = " or ".join(str(count) for count in dict.fromkeys(problems))
    return [
        Chart(
            f"handoff{suffix}",
            "The student begins, the teacher finishes",
            Axis("part that the student wrote", percent=True, range=(-2, 102)),
            Axis("right answers", percent=True, range=(0, 103)),
            tuple(one for one in series if one.legend or several),
            f"Right answers{f' of {counts} problems' if counts else ''} when the teacher goes on from the first part of "
            f"the untrained student's answer. {'Dotted: the student alone. ' if several and alone else ''}"
            f"{_dip(series, alone)}{CAPTION}",
            band="95 % bootstrap intervals over problems",
            markers=True,
            lines=() if several else tuple(("student alone", one.y[0] or 0.0) for one in alone),
            by="own",
        )
    ]


def _dip(series: Sequence[Series], alone: Sequence[Series]) -> str:
    """Why a curve can go below the student's own line; empty where none does."""
    levels = {one.label.removesuffix(ALONE): one.y[0] or 0.0 for one in alone}
    pairs = [(one, levels[one.label]) for one in series if one.legend and one.label in levels]
    if not any(value is not None and value < level for one, level in pairs for value in one.y):
        return ""
    words = "Below the dotted line the teacher ends these answers worse than the student itself would"
    if any(high is not None and high < level for one, level in pairs for high in one.high or ()):
        return f"{words}: such beginnings are strange to the teacher, but not to the one who wrote them. "
    return f"{words}, though not by more than chance. "


def _level(label: str, style: int, height: float) -> Series:
    return Series(f"{label}{ALONE}", style, [0.0, 100.0], [height, height], dash=STUDENT_ALONE, legend=False)


def _lead(views: Sequence[ProbeView], demo: dict[str, Any] | None) -> str:
    """The question, and where there is one curve, its answer."""
    question = "How much is the teacher's advice worth after a drifted beginning?"
    found: list[Handoff] = [part for _, part in having(views, "handoff")]
    if demo is not None and not found:
        points = [(share, interval[0]) for share, interval in demo["points"]]
        alone = demo["student"][0] if demo["student"] else None
    elif demo is None and len(found) == 1:
        means = zip(found[0].fractions, found[0].teacher.mean, strict=True)
        points = [(fraction, 100 * mean) for fraction, mean in means if mean is not None]
        student = found[0].student
        alone = None if student is None or student.mean is None else 100 * student.mean
    else:
        return question
    if not points:
        return question
    first, last = points[0], points[-1]
    return (
        f"{question} "
        + (f"From the start it is right {first[1]:.0f}\u00a0% of the time, " if first[0] == 0 else "")
        + f"after {100 * last[0]:.0f}\u00a0% of the student's answer {last[1]:.0f}\u00a0%"
        + (f"; the student alone reaches {alone:.0f}\u00a0%." if alone is not None else ".")
    )

"""The hand-off curve: the student begins an answer, the teacher finishes it."""

from __future__ import annotations

from iwopd.report.charts import NEUTRAL, Axis, Chart, Series
from iwopd.report.gathering import ReportData
from iwopd.report.panel import Panel


def build(data: ReportData) -> Panel | None:
    if data.handoff is None:
        return None
    points = data.handoff["points"]
    student = data.handoff["student"]
    series = Series(
        "teacher goes on",
        NEUTRAL,
        [100 * share for share, _ in points],
        [mean for _, (mean, _, _) in points],
        [low for _, (_, low, _) in points],
        [high for _, (_, _, high) in points],
    )
    first, last = points[0], points[-1]
    problems = f" of {data.handoff['problems']} problems" if data.handoff["problems"] else ""
    chart = Chart(
        "handoff",
        "The student begins, the teacher finishes",
        Axis("part that the student wrote", percent=True, range=(-2, 102)),
        Axis("right answers", percent=True, range=(0, 103)),
        (series,),
        f"Right answers{problems} when the teacher goes on from the first part of the untrained student's answer. "
        "It shows how much a prefix costs this teacher; it does not show how much of that a training method can win back.",
        band="95 % bootstrap intervals over problems",
        markers=True,
        lines=(("student alone", student[0]),) if student else (),
    )
    return Panel(
        "handoff",
        "Hand-off",
        "How much is the teacher's advice worth after a drifted beginning? "
        + (f"From the start it is right {first[1][0]:.0f}\u00a0% of the time, " if first[0] == 0 else "")
        + f"after {100 * last[0]:.0f}\u00a0% of the student's answer {last[1][0]:.0f}\u00a0%"
        + (f"; the student alone reaches {student[0]:.0f}\u00a0%." if student else "."),
        (chart,),
    )

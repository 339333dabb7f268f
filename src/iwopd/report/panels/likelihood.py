"""Log-likelihood of the student's prefixes under both models (Fig. 3c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iwopd.analysis.probe.result import Likelihood, PrefixLikelihood
from iwopd.report.charts import Axis, Chart, Series
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import along_chart, curve_series, having, middles

STUDENT, TEACHER = 0, 1
TEACHER_DASH = 1


def build(data: ReportData) -> Panel | None:
    drawn = charts(data.compared)
    if not drawn:
        return None
    return Panel(
        "likelihood",
        "Likelihood of prefixes",
        "How unlikely does the teacher find what the student has written so far? The gap between the two curves is the log of "
        "the prefix's importance ratio, which the ideal weight is made of.",
        tuple(drawn),
    )


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    found: list[tuple[ProbeView, Likelihood]] = having(views, "likelihood")
    if not found:
        return []
    shown = [view for view, _ in found]
    colours = "" if shown[0].alone else " Solid: under the student, dashed: under the teacher."
    fewest = min(min(part.by_token.rollouts, default=0) for _, part in found)
    by_part = along_chart(
        shown,
        f"probe-likelihood{suffix}",
        "Log-likelihood by part of the answer",
        Axis("nats"),
        _curves(found, "by_fraction"),
        f"Summed log-probs of the student's tokens so far, a mean over rollouts.{colours} A prefix that the teacher finds "
        "unlikely need not be wrong, and one that it finds likely need not be right.",
    )
    by_token = replace(
        by_part,
        id=f"probe-likelihood-tokens{suffix}",
        title="Log-likelihood by token",
        x=Axis("token of the answer", zero=True),
        series=_curves(found, "by_token"),
        caption=f"Only answers that are long enough count (at the end {fewest} rollouts), so the end of these curves is about "
        f"long answers, not about late tokens of all of them.{colours}",
    )
    return [by_part, by_token]


def _curves(found: Sequence[tuple[ProbeView, Likelihood]], name: str) -> tuple[Series, ...]:
    series: list[Series] = []
    for view, whole in found:
        part: PrefixLikelihood = getattr(whole, name)
        x = middles(part.edges, 100.0 if name == "by_fraction" else 1.0)
        looks: tuple[tuple[str, int, int | None], ...]
        if view.alone:
            looks = (("under the student", STUDENT, None), ("under the teacher", TEACHER, None))
        else:
            looks = ((f"{view.label}: student", view.style, 0), (f"{view.label}: teacher", view.style, TEACHER_DASH))
        for (label, style, dash), curve in zip(looks, (part.student, part.teacher), strict=True):
            series.append(curve_series(label, style, x, curve, dash=dash))
    return tuple(series)

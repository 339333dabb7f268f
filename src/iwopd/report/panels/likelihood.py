"""Log-likelihood of the student's prefixes under both models (Fig. 3c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iwopd.analysis.probe.result import Likelihood, PrefixLikelihood
from iwopd.report.charts import Axis, Chart, Panel, Series, chart_panel
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.probes import along_chart, curve_series, having, middles

LEAD = (
    "How unlikely does the teacher find what the student has written so far? The gap between the two curves is the log of "
    "the prefix's importance ratio, which the ideal weight is made of."
)


def build(data: ReportData) -> Panel | None:
    return chart_panel("likelihood", "Likelihood of prefixes", LEAD, charts(data.compared))


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
        [one for view, part in found for one in _curves(view, part.by_fraction, 100.0)],
        f"Summed log-probs of the student's tokens so far, a mean over rollouts.{colours} A prefix that the teacher finds "
        "unlikely need not be wrong, and one that it finds likely need not be right.",
    )
    by_token = replace(
        by_part,
        id=f"probe-likelihood-tokens{suffix}",
        title="Log-likelihood by token",
        x=Axis("token of the answer", zero=True),
        series=tuple(one for view, part in found for one in _curves(view, part.by_token, 1.0)),
        caption=f"Only answers that are long enough count (at the end {fewest} rollouts), so the end of these curves is about "
        f"long answers, not about late tokens of all of them.{colours}",
    )
    return [by_part, by_token]


def _curves(view: ProbeView, part: PrefixLikelihood, scale: float) -> list[Series]:
    """Student and teacher: two styles for a single probe, else two dashes in the probe's colour."""
    x = middles(part.edges, scale)
    if view.alone:
        return [curve_series("under the student", 0, x, part.student), curve_series("under the teacher", 1, x, part.teacher)]
    return [
        curve_series(f"{view.label}: student", view.style, x, part.student, dash=0),
        curve_series(f"{view.label}: teacher", view.style, x, part.teacher, dash=1),
    ]

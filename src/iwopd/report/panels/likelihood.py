"""Log-likelihood of the student's prefixes under both models (Fig. 3c)."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.analysis.probe.result import Likelihood, PrefixLikelihood
from iwopd.report.charts import Axis, Chart, Series
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import ALONG, PROMPT_BAND, curve_series, middles, shown_by

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
    found = [(view, view.probe.likelihood) for view in views if view.probe.likelihood is not None]
    if not found:
        return []
    colours = "" if found[0][0].alone else " Solid: under the student, dashed: under the teacher."
    fewest = min((min(part.by_token.rollouts, default=0) for _, part in found), default=0)
    return [
        Chart(
            f"probe-likelihood{suffix}",
            "Log-likelihood by part of the answer",
            ALONG,
            Axis("nats"),
            _curves(found, "by_fraction"),
            f"Summed log-probs of the student's tokens so far, a mean over rollouts.{colours} A prefix that the teacher finds "
            "unlikely need not be wrong, and one that it finds likely need not be right.",
            band=PROMPT_BAND,
            by=shown_by([view for view, _ in found]),
        ),
        Chart(
            f"probe-likelihood-tokens{suffix}",
            "Log-likelihood by token",
            Axis("token of the answer", zero=True),
            Axis("nats"),
            _curves(found, "by_token"),
            f"Only answers that are long enough count (at the end {fewest} rollouts), so the end of these curves is about long "
            f"answers, not about late tokens of all of them.{colours}",
            band=PROMPT_BAND,
            by=shown_by([view for view, _ in found]),
        ),
    ]


def _curves(found: Sequence[tuple[ProbeView, Likelihood]], name: str) -> tuple[Series, ...]:
    series: list[Series] = []
    for view, whole in found:
        part: PrefixLikelihood = getattr(whole, name)
        x = middles(part.edges, 100.0 if name == "by_fraction" else 1.0)
        if view.alone:
            series += [
                curve_series("under the student", STUDENT, x, part.student),
                curve_series("under the teacher", TEACHER, x, part.teacher),
            ]
        else:
            series += [
                curve_series(f"{view.label}: student", view.style, x, part.student, dash=0),
                curve_series(f"{view.label}: teacher", view.style, x, part.teacher, dash=TEACHER_DASH),
            ]
    return tuple(series)

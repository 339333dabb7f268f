"""Which way an update points: cosines with the gradient of correct solutions, by rule and by region of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.report.charts import Axis, Chart
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import FILLED, PROMPT_BAND, dots_chart, having

BATCH_BAND = "95 % intervals, Student's t over batches"
BASELINE = "opd"
SOLUTIONS = "A solution in other words than the data's counts as none, and optimizers take other directions than these."


def build(data: ReportData) -> Panel | None:
    drawn = charts(data.compared)
    if not drawn:
        return None
    return Panel(
        "alignment",
        "Gradient alignment",
        "Would a small step along a rule's update make correct solutions likelier? A cosine above zero says yes. Cosines grow "
        "with the batch, so compare them within a chart only; and pairs differ a lot: probe several before you believe a rule.",
        tuple(drawn),
    )


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    parts = dict(having(views, "alignment"))
    if not parts:
        return []
    shown = list(parts)
    batches = " or ".join(dict.fromkeys(f"{part.batches} batches of {part.batch_prompts} prompts" for part in parts.values()))
    opd = [one.cosine.mean for part in parts.values() for one in part.rules if one.key == BASELINE]
    level = (("OPD", opd[0]),) if shown[0].alone and opd and opd[0] is not None else ()
    captions = {
        ("rules", "cosine", "cosine", "Cosine with correct solutions", Axis("cosine")): f"{batches}. {FILLED} {SOLUTIONS}",
        ("rules", "gain", "gain", "Gain against OPD", Axis("difference of cosines")): (
            f"Cosine of the rule minus that of plain OPD on the same batch, so OPD has none. {FILLED} No correction for "
            "the number of rules: with many, one may stand out by chance."
        ),
        ("regions", "cosine", "regions", "Plain OPD on some tokens only", Axis("cosine")): (
            f"The answer is cut at its first drift, a token that the teacher finds much less likely{_threshold(shown)}. "
            f"{FILLED} Where the cut is depends on that threshold."
        ),
        ("regions", "share", "regions-share", "The regions' share of |gap|", Axis("of all |gap|", percent=True, zero=True)): (
            "How much of plain OPD's signal comes from each region. Together with the cosines: what a rule that stops at "
            "the drift would give up, and what that is worth. The third row is the first two together."
        ),
    }
    found = []
    for (part, name, chart_id, title, axis), caption in captions.items():
        rows = {view: {one.title: getattr(one, name) for one in getattr(parts[view], part)} for view in shown}
        titles = list(dict.fromkeys(title for row in rows.values() for title in row))
        band, lines = PROMPT_BAND if axis.percent else BATCH_BAND, level if name == "cosine" else ()
        whole_id = f"probe-{chart_id}{suffix}"
        found.append(dots_chart(shown, whole_id, title, axis, titles, name, rows.__getitem__, caption, band, lines))
    return [chart for chart in found if any(value is not None for series in chart.series for value in series.y)]


def _threshold(views: Sequence[ProbeView]) -> str:
    found = {view.probe.drift.threshold for view in views if view.probe.drift is not None}
    return f" (by {found.pop():g} nats)" if len(found) == 1 else ""

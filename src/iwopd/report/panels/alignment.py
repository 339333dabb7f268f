"""Which way an update points: cosines with the gradient of correct solutions, by rule and by region of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from iwopd.analysis.probe.result import Alignment
from iwopd.report.charts import Axis, Chart, Panel, chart_panel
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.probes import FILLED, PROMPT_BAND, dots_chart, having

BATCH_BAND = "95 % intervals, Student's t over batches"
LEAD = (
    "Would a small step along a rule's update make correct solutions likelier? A cosine above zero says yes. Cosines grow "
    "with the batch, so compare them within a chart only; and pairs differ a lot: probe several before you believe a rule."
)
CHARTS = {
    ("rules", "cosine", "cosine", "Cosine with correct solutions", Axis("cosine")): (
        "{batches}. {filled} A solution in other words than the data's counts as none, and optimizers take other directions "
        "than these."
    ),
    ("rules", "gain", "gain", "Gain against OPD", Axis("difference of cosines")): (
        "Cosine of the rule minus that of plain OPD on the same batch, so OPD has none. {filled} No correction for the number "
        "of rules: with many, one may stand out by chance."
    ),
    ("regions", "cosine", "regions", "Plain OPD on some tokens only", Axis("cosine")): (
        "The answer is cut at its first drift, a token that the teacher finds much less likely{threshold}. {filled} Where the "
        "cut is depends on that threshold."
    ),
    ("regions", "share", "regions-share", "The regions' share of |gap|", Axis("of all |gap|", percent=True, zero=True)): (
        "How much of plain OPD's signal comes from each region. Together with the cosines: what a rule that stops at the drift "
        "would give up, and what that is worth. The third row is the first two together."
    ),
}
"""Part of the result, its estimate, id, title and axis: caption."""
VERDICTS = (
    "Each update on right rollouts and on as many wrong ones ({compared} of each), against the solutions of their own prompts. "
    "{filled} Elsewhere (arXiv 2605.10889) alignment was found higher on wrong rollouts. The two kinds have other prompts, too."
)


def build(data: ReportData) -> Panel | None:
    return chart_panel("alignment", "Gradient alignment", LEAD, charts(data.compared))


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    parts = dict(having(views, "alignment"))
    if not parts:
        return []
    batches = " or ".join(dict.fromkeys(f"{part.batches} batches of {part.batch_prompts} prompts" for part in parts.values()))
    thresholds = {view.probe.drift.threshold for view in parts if view.probe.drift is not None}
    threshold = f" (by {thresholds.pop():g} nats)" if len(thresholds) == 1 else ""
    opd = [one.cosine.mean for part in parts.values() for one in part.rules if one.key == "opd"]
    level = (("OPD", opd[0]),) if next(iter(parts)).alone and opd and opd[0] is not None else ()
    found = []
    for (part, name, chart_id, title, axis), words in CHARTS.items():
        estimates = {view: {one.title: getattr(one, name) for one in getattr(parts[view], part)} for view in parts}
        band, lines = PROMPT_BAND if axis.percent else BATCH_BAND, level if name == "cosine" else ()
        caption = words.format(batches=batches, filled=FILLED, threshold=threshold)
        found.append(dots_chart(estimates, f"probe-{chart_id}{suffix}", title, axis, name, caption, band, lines))
    return [chart for chart in [*found, _verdicts(parts, suffix)] if any(y is not None for one in chart.series for y in one.y)]


def _verdicts(parts: Mapping[ProbeView, Alignment], suffix: str) -> Chart:
    """Right beside wrong, for the few rules that were split."""
    estimates = {
        view: {f"{one.title}, {side}": getattr(one, side) for one in part.verdicts for side in ("right", "wrong")}
        for view, part in parts.items()
    }
    compared = " or ".join(dict.fromkeys(str(part.compared) for part in parts.values()))
    caption = VERDICTS.format(compared=compared, filled=FILLED)
    title = "Cosine on right and on wrong rollouts"
    return dots_chart(estimates, f"probe-verdicts{suffix}", title, Axis("cosine"), "cosine", caption, BATCH_BAND)

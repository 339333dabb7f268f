"""Which way an update points: cosines with the gradient of correct solutions, by rule and by region of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.analysis.probe.result import Aligned, Alignment
from iwopd.report.charts import Axis, Chart, Series
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import FILLED, PROMPT_BAND, dot_series, one_each, shown_by

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
    views = [view for view in views if view.probe.alignment is not None]
    if not views:
        return []
    rules = _titles(views, "rules")
    regions = _titles(views, "regions")
    sizes = dict.fromkeys(f"{_part(view).batches} batches of {_part(view).batch_prompts} prompts" for view in views)
    batches = " or ".join(sizes)
    opd = [one.cosine.mean for view in views for one in _part(view).rules if one.key == BASELINE]
    level = (("OPD", opd[0]),) if views[0].alone and opd and opd[0] is not None else ()
    found: list[Chart] = []
    if rules:
        found += [
            _chart(
                views,
                "rules",
                "cosine",
                rules,
                f"probe-cosine{suffix}",
                "Cosine with correct solutions",
                Axis("cosine"),
                f"{batches}. {FILLED} {SOLUTIONS}",
                level,
            ),
            _chart(
                views,
                "rules",
                "gain",
                rules,
                f"probe-gain{suffix}",
                "Gain against OPD",
                Axis("difference of cosines"),
                f"Cosine of the rule minus that of plain OPD on the same batch, so OPD has none. {FILLED} No correction for "
                "the number of rules: with many, one may stand out by chance.",
            ),
        ]
    if regions:
        found += [
            _chart(
                views,
                "regions",
                "cosine",
                regions,
                f"probe-regions{suffix}",
                "Plain OPD on some tokens only",
                Axis("cosine"),
                f"The answer is cut at its first drift, a token that the teacher finds much less likely{_threshold(views)}. "
                f"{FILLED} Where the cut is depends on that threshold.",
                level,
            ),
            _chart(
                views,
                "regions",
                "share",
                regions,
                f"probe-regions-share{suffix}",
                "The regions' share of |gap|",
                Axis("of all |gap|", percent=True, zero=True),
                "How much of plain OPD's signal comes from each region. Together with the cosines: what a rule that stops at "
                "the drift would give up, and what that is worth. The third row is the first two together.",
                percent=True,
            ),
        ]
    return [chart for chart in found if any(value is not None for series in chart.series for value in series.y)]


def _chart(
    views: Sequence[ProbeView],
    part: str,
    name: str,
    titles: Sequence[str],
    chart_id: str,
    title: str,
    axis: Axis,
    caption: str,
    lines: tuple[tuple[str, float], ...] = (),
    *,
    percent: bool = False,
) -> Chart:
    def series(label: str, style: int, view: ProbeView) -> Series:
        rows: dict[str, Aligned] = {one.title: one for one in getattr(_part(view), part)}
        values = [getattr(rows[row], name) if row in rows else None for row in titles]
        return dot_series(label, style, values, 100.0 if percent else 1.0)

    return Chart(
        chart_id,
        title,
        axis,
        Axis(""),
        one_each(views, name, series),
        caption,
        band=PROMPT_BAND if percent else BATCH_BAND,
        kind="dots",
        bars=tuple(titles),
        lines=lines,
        by=shown_by(views),
    )


def _titles(views: Sequence[ProbeView], part: str) -> list[str]:
    """Rows in the order of the first probe that has them."""
    return list(dict.fromkeys(one.title for view in views for one in getattr(_part(view), part)))


def _threshold(views: Sequence[ProbeView]) -> str:
    found = {view.probe.drift.threshold for view in views if view.probe.drift is not None}
    return f" (by {found.pop():g} nats)" if len(found) == 1 else ""


def _part(view: ProbeView) -> Alignment:
    assert view.probe.alignment is not None  # those that have one were chosen
    return view.probe.alignment

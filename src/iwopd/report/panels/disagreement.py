"""Where the two models of a probe disagree: gap, KL, share of the discrepancy and overlap of likeliest tokens by position."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.report.charts import NEUTRAL, Axis, Chart, Panel, Series, chart_panel
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.probes import along_chart, counted, curve_series, having, middles, one_each

SECOND = 2
"""The dash of the second of two curves in one colour."""
NATS = Axis("nats per token", zero=True)
CURVES = {
    ("abs_gap", "gap", "Disagreement |gap|", NATS, "mean |gap|"): (
        "Mean of |lp_T − lp₀| on the student's own tokens. It shows how much the two disagree, not which of them is right."
    ),
    ("kl", "kl", "KL from student to teacher", NATS, "mean KL"): (
        "Over the whole vocabulary, before the token is drawn, so without the luck of sampling. Low values late in an answer "
        "may mean that the teacher follows the student into a mistake."
    ),
    ("share", "share", "Share of the discrepancy", Axis("of all |gap|", percent=True, zero=True), "share"): (
        "Each part's share of the total of |gap|{halves}. A share says where the signal of plain OPD goes, not what it is "
        "worth there."
    ),
}
"""Curve of the result, id, title, axis and label: caption."""


def build(data: ReportData) -> Panel | None:
    drawn = charts(data.compared)
    lead = (
        "Before training: where in the student's answers do student and teacher part? Every answer is cut into equal parts, "
        f"and each part's tokens are averaged over {counted(data.compared)}. Averages hide where single answers drift."
    )
    return chart_panel("disagreement", "Where they disagree", lead, drawn)


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    """Fig. 3: |gap|, KL, share and top-k overlap."""
    return [*_positions(views, suffix), *_top_k_overlap(views, suffix)]


def _positions(views: Sequence[ProbeView], suffix: str) -> list[Chart]:
    parts = dict(having(views, "positions"))
    bins = {len(part.edges) - 1 for part in parts.values()}
    halves = "; ".join(
        f"{'' if view.alone else view.label + ': '}half of it is spent by {100 * part.half.mean:.0f} %"
        for view, part in parts.items()
        if part.half.mean is not None
    )
    lines = (("even spread", 100 / max(bins)),) if len(bins) == 1 else ()
    drawn = []
    for (name, chart_id, title, axis, label), caption in CURVES.items() if parts else ():
        series = [
            curve_series(text, style, middles(parts[view].edges), getattr(parts[view], name), 100.0 if axis.percent else 1.0)
            for text, style, view in one_each(list(parts), label)
        ]
        words = caption.format(halves=f"; {halves}" if halves else "")
        more = {"markers": True, "lines": lines if name == "share" else ()}
        drawn.append(along_chart(list(parts), f"probe-{chart_id}{suffix}", title, axis, series, words, **more))
    return drawn


def _top_k_overlap(views: Sequence[ProbeView], suffix: str) -> list[Chart]:
    found = having(views, "overlap")
    if not found:
        return []
    several = not found[0][0].alone
    series: list[Series] = []
    for view, part in found:
        x = middles(part.edges)
        style, before = (view.style, f"{view.label}: ") if several else (NEUTRAL, "")
        series += [
            curve_series(f"{before}likeliest {part.k} in common", style, x, part.shared, 100.0, dash=0 if several else None),
            curve_series(f"{before}same likeliest token", style, x, part.same_first, 100.0, dash=SECOND),
        ]
    sizes = " or ".join(str(size) for size in dict.fromkeys(part.k for _, part in found))
    chances = {part.chance for _, part in found}
    lines = (("by chance", 100 * chances.pop()),) if len(chances) == 1 else ()
    axis = Axis("next tokens", percent=True, range=(0, 103))
    caption = (
        f"Solid: of the {sizes} likeliest next tokens, those that both models name. Dotted: how often the likeliest is the "
        "same. Sets say nothing about probabilities: two sure models may share one token and nothing else."
    )
    title, shown = "Likeliest tokens in common", [view for view, _ in found]
    return [along_chart(shown, f"probe-overlap{suffix}", title, axis, series, caption, markers=True, lines=lines)]

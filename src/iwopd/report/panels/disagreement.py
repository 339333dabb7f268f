"""Where the two models of a probe disagree: gap, KL, share of the discrepancy and overlap of likeliest tokens by position."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.report.charts import NEUTRAL, Axis, Chart, Series
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import along_chart, counted, curve_series, having, middles, one_each

SECOND = 2
"""The dash of the second of two curves in one colour."""


def build(data: ReportData) -> Panel | None:
    drawn = charts(data.compared)
    if not drawn:
        return None
    return Panel(
        "disagreement",
        "Where they disagree",
        "Before training: where in the student's answers do student and teacher part? Every answer is cut into equal parts, "
        f"and each part's tokens are averaged over {counted(data.compared)}. Averages hide where single answers drift.",
        tuple(drawn),
    )


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    """Fig. 3: |gap|, KL, share and top-k overlap."""
    return [*_positions(views, suffix), *_top_k_overlap(views, suffix)]


def _positions(views: Sequence[ProbeView], suffix: str) -> list[Chart]:
    parts = dict(having(views, "positions"))
    if not parts:
        return []
    shown = list(parts)

    def curves(name: str, label: str, scale: float = 1.0) -> tuple[Series, ...]:
        def series(label: str, style: int, view: ProbeView) -> Series:
            return curve_series(label, style, middles(parts[view].edges), getattr(parts[view], name), scale)

        return one_each(shown, label, series)

    bins = {len(part.edges) - 1 for part in parts.values()}
    halves = "; ".join(
        f"{'' if view.alone else view.label + ': '}half of it is spent by {100 * part.half.mean:.0f} %"
        for view, part in parts.items()
        if part.half.mean is not None
    )
    nats = Axis("nats per token", zero=True)
    return [
        along_chart(
            shown,
            f"probe-gap{suffix}",
            "Disagreement |gap|",
            nats,
            curves("abs_gap", "mean |gap|"),
            "Mean of |lp_T \u2212 lp\u2080| on the student's own tokens. It shows how much the two disagree, not which of them "
            "is right.",
            markers=True,
        ),
        along_chart(
            shown,
            f"probe-kl{suffix}",
            "KL from student to teacher",
            nats,
            curves("kl", "mean KL"),
            "Over the whole vocabulary, before the token is drawn, so without the luck of sampling. Low values late in an "
            "answer may mean that the teacher follows the student into a mistake.",
            markers=True,
        ),
        along_chart(
            shown,
            f"probe-share{suffix}",
            "Share of the discrepancy",
            Axis("of all |gap|", percent=True, zero=True),
            curves("share", "share", 100.0),
            f"Each part's share of the total of |gap|{'; ' + halves if halves else ''}. A share says where the signal of plain "
            "OPD goes, not what it is worth there.",
            markers=True,
            lines=(("even spread", 100 / next(iter(bins))),) if len(bins) == 1 else (),
        ),
    ]


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
    chart = along_chart(
        [view for view, _ in found],
        f"probe-overlap{suffix}",
        "Likeliest tokens in common",
        Axis("next tokens", percent=True, range=(0, 103)),
        series,
        f"Solid: of the {sizes} likeliest next tokens, those that both models name. Dotted: how often the likeliest is the "
        "same. Sets say nothing about probabilities: two sure models may share one token and nothing else.",
        markers=True,
        lines=(("by chance", 100 * chances.pop()),) if len(chances) == 1 else (),
    )
    return [chart]

"""Where the two models of a probe disagree: gap, KL, share of the discrepancy and overlap of likeliest tokens by position."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.analysis.probe.result import Overlap, Positions
from iwopd.report.charts import NEUTRAL, Axis, Chart, Series
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import ALONG, PROMPT_BAND, counted, curve_series, middles, one_each, shown_by

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
    """Fig. 3: |gap|, KL, share and overlap."""
    return [*_positions([v for v in views if v.probe.positions is not None], suffix), *_overlap(views, suffix)]


def _positions(views: Sequence[ProbeView], suffix: str) -> list[Chart]:
    if not views:
        return []

    def curves(name: str, label: str, scale: float = 1.0) -> tuple[Series, ...]:
        def series(label: str, style: int, view: ProbeView) -> Series:
            part = _part(view)
            return curve_series(label, style, middles(part.edges), getattr(part, name), scale)

        return one_each(views, label, series)

    bins = {len(_part(view).edges) - 1 for view in views}
    half = [(view, _part(view).half.mean) for view in views]
    halves = "; ".join(
        f"{'' if view.alone else view.label + ': '}half of it is spent by {100 * place:.0f} %"
        for view, place in half
        if place is not None
    )
    return [
        Chart(
            f"probe-gap{suffix}",
            "Disagreement |gap|",
            ALONG,
            Axis("nats per token", zero=True),
            curves("abs_gap", "mean |gap|"),
            "Mean of |lp_T \u2212 lp\u2080| on the student's own tokens. It shows how much the two disagree, not which of them "
            "is right.",
            band=PROMPT_BAND,
            markers=True,
            by=shown_by(views),
        ),
        Chart(
            f"probe-kl{suffix}",
            "KL from student to teacher",
            ALONG,
            Axis("nats per token", zero=True),
            curves("kl", "mean KL"),
            "Over the whole vocabulary, before the token is drawn, so without the luck of sampling. Low values late in an "
            "answer may mean that the teacher follows the student into a mistake.",
            band=PROMPT_BAND,
            markers=True,
            by=shown_by(views),
        ),
        Chart(
            f"probe-share{suffix}",
            "Share of the discrepancy",
            ALONG,
            Axis("of all |gap|", percent=True, zero=True),
            curves("share", "share", 100.0),
            f"Each part's share of the total of |gap|{'; ' + halves if halves else ''}. A share says where the signal of plain "
            "OPD goes, not what it is worth there.",
            band=PROMPT_BAND,
            markers=True,
            lines=(("even spread", 100 / next(iter(bins))),) if len(bins) == 1 else (),
            by=shown_by(views),
        ),
    ]


def _overlap(views: Sequence[ProbeView], suffix: str) -> list[Chart]:
    views = [view for view in views if view.probe.overlap is not None]
    if not views:
        return []
    several = not views[0].alone
    series: list[Series] = []
    parts: list[Overlap] = []
    for view in views:
        part = view.probe.overlap
        assert part is not None  # those that have one were chosen
        parts.append(part)
        x = middles(part.edges)
        style = view.style if several else NEUTRAL
        before = f"{view.label}: " if several else ""
        series += [
            curve_series(f"{before}likeliest {part.k} in common", style, x, part.shared, 100.0, dash=0 if several else None),
            curve_series(f"{before}same likeliest token", style, x, part.same_first, 100.0, dash=SECOND),
        ]
    sizes = " or ".join(str(size) for size in dict.fromkeys(part.k for part in parts))
    chances = {part.chance for part in parts}
    return [
        Chart(
            f"probe-overlap{suffix}",
            "Likeliest tokens in common",
            ALONG,
            Axis("next tokens", percent=True, range=(0, 103)),
            tuple(series),
            f"Solid: of the {sizes} likeliest next tokens, those that both models name. Dotted: how often the likeliest is the "
            "same. Sets say nothing about probabilities: two sure models may share one token and nothing else.",
            band=PROMPT_BAND,
            markers=True,
            lines=(("by chance", 100 * chances.pop()),) if len(chances) == 1 else (),
            by=shown_by(views),
        )
    ]


def _part(view: ProbeView) -> Positions:
    assert view.probe.positions is not None  # those that have one were chosen
    return view.probe.positions

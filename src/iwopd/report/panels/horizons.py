"""Answers that stop earlier: which share of the tokens would be written, and how much of the update is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iwopd.analysis.probe.result import KEPT, HorizonEffect, Horizons
from iwopd.report.charts import Axis, Chart, Panel, Series
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panels.alignment import BATCH_BAND
from iwopd.report.probes import having

LEAD = (
    "Late tokens of a drifted answer teach little. How much of the update is left if answers stop earlier, and what does that "
    "save? The probe's answers were written to the end and then cut as training would have stopped them."
)
CAPTION = (
    "Cosine of the expected update on cut answers with that on full ones (top right); what is noise in a batch does not count. "
    "Along a line the threshold falls from 0.5 to 0.02 (drift), or the limit grows (fixed). {dashes}Measured with the student "
    "as it is: as it learns, drift stops it later."
)
FAMILIES = {"drift": None, "fixed": 1}
"""Kinds of horizons and their dashes; None: the style's own, with markers."""


def build(data: ReportData) -> Panel | None:
    found = charts(data.compared)
    if not found:
        return None
    tables = [_table(view, part) for view, part in having(data.compared, "horizons")]
    return Panel("horizons", "Horizons", LEAD, tuple(found), "horizons.html.j2", {"tables": tables})


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    parts: list[tuple[ProbeView, Horizons]] = having(views, "horizons")
    series = [one for view, part in parts for one in (_own(part) if view.alone else _compared(view, part))]
    if not any(y is not None for one in series for y in one.y):
        return []
    lowest = min(y for one in series for values in (one.y, one.low or ()) for y in values if y is not None)
    alone = parts[0][0].alone
    return [
        Chart(
            f"probe-horizons{suffix}",
            "Tokens written and update kept",
            Axis("tokens written", percent=True, range=(0, 100)),
            Axis("cosine with the full update", range=(min(0.0, lowest) - 0.05, 1.05)),
            tuple(series),
            CAPTION.format(dashes="" if alone else "Drift only; solid: OPD, dashed: survival. "),
            band=BATCH_BAND,
            markers=True,
            lines=((f"{KEPT:g}, asked of a proposal", KEPT),),
            by="own" if alone else "probe",
        )
    ]


def _own(part: Horizons) -> list[Series]:
    """A line for every method and kind of horizon."""
    methods = part.horizons[0].methods if part.horizons else []
    return [
        _series(f"{one.title}, {family}", 2 * place, dash, part, one.key, family)
        for place, one in enumerate(methods)
        for family, dash in FAMILIES.items()
    ]


def _compared(view: ProbeView, part: Horizons) -> list[Series]:
    methods = part.horizons[0].methods if part.horizons else []
    return [
        _series(f"{view.label}: {one.title}", view.style, place, part, one.key, "drift") for place, one in enumerate(methods)
    ]


def _series(label: str, style: int, dash: int | None, part: Horizons, method: str, family: str) -> Series:
    points = []
    for row in part.horizons:
        kept = row.of(method)
        if row.section.get("type") in (family, "full") and kept is not None and row.written.mean is not None:
            points.append((100 * row.written.mean, kept.kept))
    points.sort(key=lambda point: point[0])
    columns = ([getattr(kept, end) for _, kept in points] for end in ("mean", "low", "high"))
    y, low, high = columns
    return Series(label, style, [x for x, _ in points], y, low, high, dash)


def _table(view: ProbeView, part: Horizons) -> dict[str, Any]:
    proposal = part.proposal
    return {
        "label": "" if view.alone else view.label,
        "style": view.style,
        "methods": [one.title for one in part.horizons[0].methods] if part.horizons else [],
        "rows": [_row(row) for row in part.horizons],
        "words": "" if proposal is None else proposal.words,
        "toml": "" if proposal is None or proposal.section.get("type") == "full" else proposal.toml,
    }


def _row(row: HorizonEffect) -> dict[str, Any]:
    return {"title": row.title, "written": row.written, "stopped": row.stopped, "prompts": row.prompts, "methods": row.methods}

"""The sections of the page, one module each.

A panel module has a function `build(data) -> Panel | None`: charts and words for one question, or None when runs and probes
have nothing to say about it (say why with `data.notes.add`). To add one, write the module and put it into `PANELS`; a template
of its own in `templates/panels/` is needed only if leads and captions do not say it all. Modules on probes also have
`charts(views, suffix)`, for sections on one probe each.
"""

from __future__ import annotations

from dataclasses import replace

from iwopd.report.charts import Panel
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panels import (
    alerts,
    alignment,
    disagreement,
    handoff,
    health,
    horizons,
    learning,
    likelihood,
    position,
    summary,
    tokens,
    verdict,
    weights,
)

WORDS = (alerts, verdict, summary)
"""Sections without charts, at the top."""
CHARTS = (learning, position, handoff, disagreement, likelihood, weights, alignment, horizons, health)
PANELS = (*WORDS, *CHARTS[:-1], tokens, health)
"""In the order of the page."""


def build_panels(data: ReportData, *, charts_only: bool = False) -> list[Panel]:
    """All sections that there is something for; then one per probe, where there are too many for colours in one chart.

    On a page about runs, the hand-off curve stands in the summary.
    """
    modules = CHARTS if charts_only else PANELS if not data.runs else [one for one in PANELS if one is not handoff]
    panels = [panel for module in modules if (panel := module.build(data)) is not None]
    sections = [] if data.compared else [_section(view, place) for place, view in enumerate(data.probes, 1)]
    return [*panels, *sections]


def _section(view: ProbeView, place: int) -> Panel:
    plain = [replace(view, style=0, alone=True)]
    suffix = f"-probe-{place}"
    charts = handoff.charts(plain, suffix=suffix)
    for module in (disagreement, likelihood, weights, alignment, horizons):
        charts += module.charts(plain, suffix)
    context = {"cards": [verdict.card(view, named=False)], "columns": (), "several": False}
    return Panel(f"probe-{place}", f"Probe: {view.label}", "", tuple(charts), "verdict.html.j2", context)

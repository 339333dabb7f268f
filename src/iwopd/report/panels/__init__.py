"""The sections of the page, one module each.

A panel module has a function `build(data) -> Panel | None`: charts and words for one question, or None when runs and probes
have nothing to say about it (say why with `data.notes.add`). To add one, write the module and put it into `PANELS`; a template
of its own in `templates/panels/` is needed only if leads and captions do not say it all. Modules on probes also have
`charts(views, suffix)`, for sections on one probe each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.panels import (
    alignment,
    disagreement,
    handoff,
    health,
    learning,
    likelihood,
    position,
    summary,
    tokens,
    verdict,
    weights,
)

PANELS: tuple[Callable[[ReportData], Panel | None], ...] = (
    verdict.build,
    summary.build,
    learning.build,
    position.build,
    handoff.build,
    disagreement.build,
    likelihood.build,
    weights.build,
    alignment.build,
    tokens.build,
    health.build,
)


def build_panels(data: ReportData) -> list[Panel]:
    """All sections that there is something for, in the order of the page."""
    panels = [panel for build in PANELS if (panel := build(data)) is not None]
    return [*panels, *probe_sections(data)]


def probe_sections(data: ReportData) -> list[Panel]:
    """One section a probe, where there are too many for colours in one chart."""
    return [] if data.compared else [_section(view, place) for place, view in enumerate(data.probes, 1)]


def _section(view: ProbeView, place: int) -> Panel:
    plain = replace(view, style=0, alone=True)
    suffix = f"-probe-{place}"
    return Panel(
        f"probe-{place}",
        f"Probe: {view.label}",
        "",
        (
            *handoff.charts([plain], suffix=suffix),
            *disagreement.charts([plain], suffix),
            *likelihood.charts([plain], suffix),
            *weights.charts([plain], suffix),
            *alignment.charts([plain], suffix),
        ),
        "verdict.html.j2",
        {"cards": [verdict.card(view, named=False)], "columns": (), "several": False},
    )

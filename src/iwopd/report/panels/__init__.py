"""The sections of the page, one module each.

A panel module has a function `build(data) -> Panel | None`: charts and words for one question, or None when the runs have
nothing to say about it (say why with `data.notes.add`). To add one, write the module and put it into `PANELS`; a template of
its own in `templates/panels/` is needed only if leads and captions do not say it all.
"""

from __future__ import annotations

from collections.abc import Callable

from iwopd.report.gathering import ReportData
from iwopd.report.panel import Panel
from iwopd.report.panels import handoff, health, learning, position, summary, tokens

PANELS: tuple[Callable[[ReportData], Panel | None], ...] = (
    summary.build,
    learning.build,
    position.build,
    handoff.build,
    tokens.build,
    health.build,
)


def build_panels(data: ReportData) -> list[Panel]:
    """All sections that the runs have something for, in the order of the page."""
    return [panel for build in PANELS if (panel := build(data)) is not None]

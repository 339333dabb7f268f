"""What a section of the page is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from iwopd.report.charts import Chart


@dataclass(frozen=True)
class Panel:
    """One section."""

    id: str
    """Its anchor: letters and hyphens."""
    title: str
    lead: str
    """The question it answers, in a sentence or two."""
    charts: tuple[Chart, ...] = ()
    template: str = "charts.html.j2"
    context: dict[str, Any] = field(default_factory=dict)
    """For its template."""
    data: dict[str, Any] | None = None
    """JSON for its script, as `<script type="application/json" id="data-ID">`."""

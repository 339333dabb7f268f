"""What a probe found, in words: the verdict, the numbers behind it, and what was not measured and why."""

from __future__ import annotations

from typing import Any

from iwopd.analysis.probe.result import Probe
from iwopd.report.charts import Panel
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.probes import estimate

WORDS = {
    "strong": "Strong position bias",
    "moderate": "Moderate position bias",
    "none": "No position bias",
    "unclear": "Unclear",
    "unmeasurable": "Not measurable",
}
PARTS = {
    "handoff": "hand-off curve",
    "positions": "disagreement by position",
    "overlap": "overlap of likeliest tokens",
    "likelihood": "prefix likelihood",
    "rules": "weight rules",
    "alignment": "gradient alignment",
    "agreement": "agreement of gradients",
    "horizons": "horizons",
}
FIGURES = {
    "fall of the hand-off curve": ("handoff", "fall", "points"),
    "student alone": ("handoff", "student", "%"),
    "half of |gap| spent by": ("positions", "half", "%"),
    "|gap| on the first 30 %": ("positions", "first_30", "%"),
    "rollouts that drift": ("drift", "rollouts", "%"),
    "likeliest token the same": ("overlap", "mean_same_first", "%"),
    "agreement after drifts": ("agreement", "cosine", ""),
}
"""The figures that count: part, estimate, unit; without one it is a cosine."""


def build(data: ReportData) -> Panel | None:
    if not data.compared:
        return None
    several = len(data.compared) > 1
    return Panel(
        "probe",
        "Position bias",
        "Is the teacher's advice worth less late in this student's answers? Measured from the student's rollouts, before any "
        "training.",
        template="verdict.html.j2",
        context={"cards": [card(view, named=several) for view in data.compared], "columns": tuple(FIGURES), "several": several},
    )


def card(view: ProbeView, *, named: bool) -> dict[str, Any]:
    """What the template shows of one probe."""
    probe = view.probe
    return {
        "label": view.label if named else "",
        "style": view.style,
        "pair": view.pair,
        "bias": probe.bias,
        "word": WORDS[probe.bias],
        "sentences": probe.verdict,
        "missing": [(PARTS.get(name, name), reason) for name, reason in probe.missing.items()],
        "notes": probe.notes,
        "figures": figures(probe),
    }


def figures(probe: Probe) -> list[tuple[str, str, str]]:
    """Name, number and interval of each of `FIGURES`."""
    rows = []
    for name, (part, field, unit) in FIGURES.items():
        scale, digits = (100.0, 0) if unit else (1.0, 2)
        words = estimate(getattr(getattr(probe, part), field, None), scale, digits)
        mean, _, rest = words.partition(" (")
        rows.append((name, "not measured" if words == "?" else f"{mean}\u00a0{unit}".rstrip(), rest.rstrip(")")))
    return rows

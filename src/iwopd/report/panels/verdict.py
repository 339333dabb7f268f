"""What a probe found, in words: the verdict, the numbers behind it, and what was not measured and why."""

from __future__ import annotations

from typing import Any

from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
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
}


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
        context={"cards": [card(view, named=several) for view in data.compared], "columns": FIGURES, "several": several},
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
        "figures": figures(view),
    }


FIGURES = (
    "fall of the hand-off curve",
    "student alone",
    "half of |gap| spent by",
    "|gap| on the first 30 %",
    "rollouts that drift",
    "likeliest token the same",
)


def figures(view: ProbeView) -> list[tuple[str, str, str]]:
    """Name, number and interval of the figures that count, in the order of `FIGURES`."""
    probe = view.probe
    found = (
        (probe.handoff.fall if probe.handoff else None, " points"),
        (probe.handoff.student if probe.handoff else None, " %"),
        (probe.positions.half if probe.positions else None, " %"),
        (probe.positions.first_30 if probe.positions else None, " %"),
        (probe.drift.rollouts if probe.drift else None, " %"),
        (probe.overlap.mean_same_first if probe.overlap else None, " %"),
    )
    rows = []
    for name, (value, unit) in zip(FIGURES, found, strict=True):
        words = estimate(value, 100.0)
        mean, _, rest = words.partition(" (")
        rows.append((name, "not measured" if words == "?" else f"{mean}\u00a0{unit.strip()}", rest.rstrip(")")))
    return rows

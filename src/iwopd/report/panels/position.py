"""Where in the answers does the teacher's signal go? Gap, KL and weights along the answer, as the runs recorded them."""

from __future__ import annotations

from iwopd.report.charts import ALONG, Chart, Panel, Series, chart_panel, full_axis
from iwopd.report.gathering import ReportData
from iwopd.report.series import all_values, position_series, same_curve, signed_share, window_steps

QUANTITIES = {
    ("abs_gap", "Disagreement", "mean |gap|, nats per token"): "|lp_T − lp₀| of the tokens.",
    ("kl", "Distance", "mean of minus gap, nats per token"): (
        "lp₀ − lp_T of the tokens: the single-sample estimate of the reverse KL."
    ),
    ("weights", "Token weights", "weight"): "Mean weight that the run's own method gave.",
}
"""Metric, title and axis: caption."""
LEAD = (
    "Where does the teacher's signal go? Every answer is cut into equal parts, and each part's tokens are averaged over the "
    "training rollouts of the first and of the last tenth of the steps. These averages hide that answers drift at different "
    "places; the token view below shows single answers."
)
PARTS = {"first": "at the start", "last": "at the end"}


def build(data: ReportData) -> Panel | None:
    if not data.runs:
        return None
    charts: list[Chart] = []
    found = {name: {part: _series(data, f"position/{name}", part) for part in PARTS} for name, _, _ in QUANTITIES}
    sizes, signed = ([one for series in found[name].values() for one in series] for name in ("abs_gap", "kl"))
    alike = same_curve(signed_share(sizes, signed))
    for (name, title, unit), caption in QUANTITIES.items():
        drawn = found[name]
        if name == "kl" and alike:
            continue
        if not any(drawn.values()):
            data.notes.add("position", f"no run recorded position/{name}")
            continue
        axis = full_axis(unit, all_values([one for series in drawn.values() for one in series]))  # shared: the two are compared
        charts += [
            Chart(
                f"position-{name.replace('_', '-')}-{part}",
                f"{title} {PARTS[part]}",
                ALONG,
                axis,
                tuple(series),
                f"{caption}{alike if name == 'abs_gap' else ''} {_steps(data, part)}",
                markers=True,
            )
            for part, series in drawn.items()
            if series
        ]
    return chart_panel("position", "Along the answer", LEAD, charts)


def _series(data: ReportData, metric: str, part: str) -> list[Series]:
    return [found for group in data.groups if (found := position_series(group, metric, part)) is not None]


def _steps(data: ReportData, part: str) -> str:
    spans = {(steps[0], steps[-1]) for run in data.runs if run.metrics and (steps := window_steps(run, part))}
    if len(spans) == 1:
        first, last = next(iter(spans))
        return f"Step {first}." if first == last else f"Steps {first} to {last}."
    return f"The {part} tenth of each run's steps."

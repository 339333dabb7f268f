"""The paper's figures 1 to 4 as data: which charts stand side by side, and what a place without data would need."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iwopd.analysis.probe.result import Rules
from iwopd.report.charts import ALONG, Axis, Chart, Series
from iwopd.report.gathering import Group, ProbeView, ReportData, TaskCurve, last_part
from iwopd.report.panels import handoff, likelihood, weights
from iwopd.report.panels.summary import against
from iwopd.report.probes import PROMPT_BAND, curve_series, having, middles
from iwopd.report.series import accuracy_chart, metric_chart, position_series
from iwopd.runs.reading import Run
from iwopd.tiny import STUDENT_SIZES

BEFORE_DASH = 2
"""Curves of the first steps beside those of the last."""
WORLD_STUDENT = "medium"
"""The embedded worlds' student where a run names no size."""


@dataclass(frozen=True)
class Cell:
    """A place in a figure: its chart, or what is needed to fill it."""

    title: str
    chart: Chart | None
    needs: str


# --- figure 1 ---------------------------------------------------------------------------------------------------------


def _prefix_suffix(data: ReportData) -> Chart | None:
    partial = _curves(data, lambda run: _rule(run) in ("prefix-only", "suffix-only"))
    return _accuracy("fig1a", [*partial, *_curves(data, _is_opd)] if partial else [])


def _handoff(data: ReportData) -> Chart | None:
    measured = [view for view, _ in having(_shown(data), "handoff")]
    charts = handoff.charts(measured, None if measured else data.handoff)
    return charts[0] if charts else None


# --- figure 2 ---------------------------------------------------------------------------------------------------------


def _learning(data: ReportData) -> Chart | None:
    """The two methods; where there are several students, the first one's."""
    curves = _curves(data, lambda run: _is_opd(run) or _is_iw(run))
    students = list(dict.fromkeys(_student(curve.group) for curve in curves))
    chart = _accuracy("fig2a", [curve for curve in curves if _student(curve.group) == students[0]])
    return replace(chart, x=Axis(f"step ({students[0]})")) if chart is not None and len(students) > 1 else chart


def _by_student(data: ReportData) -> Chart | None:
    """The difference between the two methods, paired by problem; one row per student, one series per task."""
    pairs: dict[str, dict[str, list[float]]] = {}
    for task, curves in data.tasks.items():
        for student in dict.fromkeys(_student(curve.group) for curve in curves):
            mine = [curve for curve in curves if _student(curve.group) == student]
            opd = next((curve for curve in mine if _is_opd(curve.group.runs[0])), None)
            iw = next((curve for curve in mine if _is_iw(curve.group.runs[0])), None)
            found = against(task, iw, opd, data) if opd is not None and iw is not None else None
            if found is not None:
                pairs.setdefault(student, {})[task] = [100 * value for value in found.differences[0].interval]
    if len(pairs) < 2:
        return None
    rows = sorted(pairs, key=_size)
    tasks = [task for task in data.tasks if any(task in pairs[row] for row in rows)]
    series = []
    for style, task in enumerate(tasks):
        values = [pairs[row].get(task, (None, None, None)) for row in rows]
        mean, low, high = ([value[place] for value in values] for place in range(3))
        series.append(Series(task, style, list(range(len(rows))), mean, low, high))
    caption = "Difference of accuracies at the last step that both methods reached, paired by problem."
    looks: Any = {"band": "95 % intervals", "kind": "dots", "bars": tuple(rows), "by": "own"}
    return Chart("fig2b", "IW-OPD minus OPD", Axis("difference in points"), Axis(""), tuple(series), caption, **looks)


# --- figure 3 ---------------------------------------------------------------------------------------------------------


def _kl_training(data: ReportData) -> Chart | None:
    axis = Axis("lp₀ − lp_T, nats per token", zero=True)
    return metric_chart(_two(data), "kl/sampled", "fig3a", "KL during training", axis, by="own")


def _kl_position(data: ReportData) -> Chart | None:
    """At the start and at the end of the runs; without runs, the probes' before training."""
    series: list[Series] = []
    for group in _two(data):
        for part, words, dash in (("last", "last steps", None), ("first", "first steps", BEFORE_DASH)):
            if (found := position_series(group, "position/kl", part)) is not None:
                series.append(replace(found, label=f"{group.label}, {words}", dash=dash))
    band = "" if series else PROMPT_BAND
    for view, part_of in having(_shown(data), "positions") if not series else ():
        label = "before training" if view.alone else view.label
        series.append(curve_series(label, view.style, middles(part_of.edges), part_of.kl))
    axis = Axis("KL, nats per token", zero=True)
    chart = Chart("fig3b", "KL along the answer", ALONG, axis, tuple(series), "", band=band, markers=True, by="own")
    return chart if series else None


def _likelihood(data: ReportData) -> Chart | None:
    return next((likelihood.charts([replace(view, alone=True)])[0] for view, _ in having(_shown(data), "likelihood")), None)


# --- figure 4 ---------------------------------------------------------------------------------------------------------


def _ideal_learning(data: ReportData) -> Chart | None:
    curves = _curves(data, lambda run: _rule(run) == "ideal" and run.setting("method.params.gamma", float) is None)
    chart = _accuracy("fig4a", curves)
    alphas = [f"alpha {curve.group.runs[0].setting('method.params.alpha', float, 0.01):g}" for curve in curves]
    if chart is None or len(set(alphas)) < len(alphas):
        return chart
    return replace(chart, series=tuple(replace(one, label=label) for one, label in zip(chart.series, alphas, strict=True)))


def _weights(data: ReportData) -> Chart | None:
    """The ideal weight at its alphas, with the surrogate that stands for it."""
    found = having(_shown(data), "rules")
    if not found:
        return None
    rules: Rules = found[0][1]
    chosen = [rule for rule in rules.rules if rule.key.startswith("ideal-") and rule.key != "ideal-blend"]
    chosen += [rule for rule in rules.rules if rule.key == "surrogate-only"]
    labels = [rule.title.removeprefix("Ideal weight, ") for rule in chosen]
    curves = zip(labels, map(weights.typical, chosen), strict=True)
    series = tuple(curve_series(label, style, middles(rules.edges), curve) for style, (label, curve) in enumerate(curves))
    axis, band = weights.weight_axis(chosen), weights.SPREAD_BAND
    return Chart("fig4b", "Weights", ALONG, axis, series, "", band=band, markers=True, by="own") if series else None


def _sums(data: ReportData) -> Chart | None:
    return next((weights.sums(rules) for _, rules in having(_shown(data), "rules")), None)


# --- what to choose from ----------------------------------------------------------------------------------------------


def _shown(data: ReportData) -> tuple[ProbeView, ...]:
    """Print has no room for more than the page compares: the first one then stands for all."""
    return data.compared or data.probes[:1]


def _curves(data: ReportData, belongs: Callable[[Run], bool]) -> list[TaskCurve]:
    """Of the first task on which such a run was evaluated."""
    for curves in data.tasks.values():
        if found := [curve for curve in curves if belongs(curve.group.runs[0])]:
            return found
    return []


def _accuracy(name: str, curves: Sequence[TaskCurve]) -> Chart | None:
    return accuracy_chart(curves, name, "Accuracy", by="own") if curves else None


def _two(data: ReportData) -> list[Group]:
    """OPD and IW-OPD; if neither is there, all."""
    return [group for group in data.groups if _is_opd(group.runs[0]) or _is_iw(group.runs[0])] or list(data.groups)


def _rule(run: Run) -> str:
    return str(run.setting("method.weights", str, "uniform" if run.setting("method", dict) is not None else ""))


def _is_opd(run: Run) -> bool:
    return _rule(run) == "uniform" and run.setting("method.advantage", str, "opd") == "opd"


def _is_iw(run: Run) -> bool:
    blend = run.setting("method.params.blend", bool, True)
    return _rule(run) == "cumulative-share" and blend and run.setting("method.advantage", str, "opd") == "opd"


def _student(group: Group) -> str:
    named: str = group.runs[0].setting("models.student", str, "")
    return last_part(named) if named else str(group.runs[0].setting("models.student_size", str, WORLD_STUDENT))


def _size(student: str) -> tuple[float, str]:
    """Smallest first: by the embedded world's sizes, or by the number of parameters in the name."""
    if student in STUDENT_SIZES:
        return list(STUDENT_SIZES).index(student), ""
    found = re.search(r"(?<!\d)(\d++(?:\.\d++)?)\s*+([mMbB])(?![a-zA-Z])", student)
    return (float(found[1]) * (1e9 if found[2] in "bB" else 1e6) if found else float("inf")), student


FIGURES: dict[str, tuple[tuple[str, Callable[[ReportData], Chart | None], str], ...]] = {
    "fig1": (
        ("Prefix or suffix alone", _prefix_suffix, "runs of Prefix-30 or Suffix-30"),
        ("Hand-off", _handoff, "a probe with answers, or a hand-off file"),
    ),
    "fig2": (
        ("Learning curves", _learning, "evaluated runs of OPD or IW-OPD"),
        ("IW-OPD minus OPD by student", _by_student, "runs of OPD and IW-OPD with several students"),
    ),
    "fig3": (
        ("KL during training", _kl_training, "runs of OPD or IW-OPD with metrics"),
        ("KL along the answer", _kl_position, "runs with metrics, or a probe"),
        ("Prefix log-likelihood", _likelihood, "a probe"),
    ),
    "fig4": (
        ("Ideal weights, learning", _ideal_learning, "evaluated runs of ideal weights"),
        ("Weights along the answer", _weights, "a probe"),
        ("Signed and unsigned sums", _sums, "a probe"),
    ),
}
"""Title of each place, what fills it, and what that needs."""


def sheets(data: ReportData) -> dict[str, list[Cell]]:
    """Figures 1 to 4, from whatever runs and probes there are."""
    return {name: [Cell(title, draw(data), needs) for title, draw, needs in places] for name, places in FIGURES.items()}

"""Did it learn? Accuracy over training, and how far the student stays from its teacher."""

from __future__ import annotations

from dataclasses import replace

from iwopd.report.charts import Axis, Chart, Panel
from iwopd.report.gathering import ReportData
from iwopd.report.series import accuracy_chart, metric_chart, same_curve, signed_share

CURVES = {
    ("reward/mean", "reward", "Reward", "of training rollouts"): (
        "Mean of the checker's verdicts on training rollouts; those without a verdict are left out."
    ),
    ("gap/abs_mean", "gap", "Disagreement with the teacher", "mean |gap|, nats per token"): (
        "|lp_T − lp₀| on training rollouts. The weights of IW-OPD are made of it; it is no measure of skill."
    ),
    ("kl/sampled", "kl", "Distance to the teacher", "mean of minus gap, nats per token"): (
        "lp₀ − lp_T on training rollouts, an estimate of the reverse KL. It is no measure of skill."
    ),
}
"""Metric, id, title and axis: caption."""


def build(data: ReportData) -> Panel | None:
    if not data.runs:
        return None
    charts = _accuracy(data)
    drawn = {
        name: chart
        for (metric, name, title, unit), caption in CURVES.items()
        if (chart := metric_chart(data.groups, metric, name, title, Axis(unit, zero=True), caption)) is not None
    }
    if {"gap", "kl"} <= drawn.keys() and (words := same_curve(signed_share(drawn["gap"].series, drawn["kl"].series))):
        drawn["gap"] = replace(drawn["gap"], caption=drawn["gap"].caption + words)
        del drawn["kl"]
    charts += drawn.values()
    if not charts:
        data.notes.add("learning curves", "no run has an evaluation or a metric to draw")
        return None
    if not data.tasks:
        data.notes.add("learning curves", "no run was evaluated: accuracy over training is not known")
    lead = "Did it learn? Step 0 is the student before distillation."
    if len(data.groups) > 1 and len({(run.about.get("data"), run.seed) for run in data.runs}) == 1:
        lead += " All methods saw the same prompts in the same order."
    return Panel("learning", "Learning curves", lead, tuple(charts))


def _accuracy(data: ReportData) -> list[Chart]:
    charts = []
    for place, (task, curves) in enumerate(data.tasks.items()):
        problems = sorted({len(curve.problem_ids) for curve in curves})
        caption = (
            f"Share of right answers to {' or '.join(map(str, problems))} problems. An interval over problems says how far "
            "other problems would move the number; it does not cover another seed or another pair of models."
        )
        charts.append(accuracy_chart(curves, f"accuracy-{place}", f"Accuracy on {task}", caption))
    return charts

"""Did it learn? Accuracy over training, and how far the student stays from its teacher."""

from __future__ import annotations

from iwopd.report.charts import Axis, Chart, Panel
from iwopd.report.gathering import ReportData
from iwopd.report.series import accuracy_chart, metric_chart

CURVES = {
    ("reward/mean", "reward", "Reward", "of training rollouts"): (
        "Mean of the checker's verdicts on training rollouts; those without a verdict are left out."
    ),
    ("kl/sampled", "kl", "Distance to the teacher", "lp₀ − lp_T, nats per token"): (
        "Student minus teacher log-prob on training rollouts, an estimate of the reverse KL. It is no measure of skill."
    ),
    ("gap/abs_mean", "gap", "Size of the disagreement", "|lp_T − lp₀|, nats per token"): (
        "Mean absolute gap between the two log-probs. The weights of IW-OPD are made of it."
    ),
}
"""Metric, id, title and axis: caption."""


def build(data: ReportData) -> Panel | None:
    if not data.runs:
        return None
    charts = _accuracy(data)
    for (metric, name, title, unit), caption in CURVES.items():
        if (chart := metric_chart(data.groups, metric, name, title, Axis(unit, zero=True), caption)) is not None:
            charts.append(chart)
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

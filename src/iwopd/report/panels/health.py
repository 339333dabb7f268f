"""Was the training sound? What an experienced eye checks first, as a table and as curves."""

from __future__ import annotations

from typing import Any

from iwopd.algo.drift_weights import LEAST, SLOPE
from iwopd.report.charts import Axis, Chart, Panel, Series
from iwopd.report.gathering import Group, ReportData
from iwopd.report.series import all_values, metric_chart
from iwopd.runs.alerts import CHECKS, CUT_SHARE, find_alerts
from iwopd.runs.logs import number

TOKENS = Axis("tokens", zero=True)
TOKEN_SHARE = Axis("tokens", percent=True, zero=True)
CURVES = {
    ("loss", "loss", "Loss", Axis("loss")): "The clipped surrogate, a mean over the step's supervised tokens.",
    ("grad_norm", "gradient", "Gradient norm", Axis("norm", zero=True)): "Before clipping.",
    ("gradient/agreement", "agreement", "Agreement after drifts", Axis("cosine")): (
        "Cosine of the gradients of tokens before and after drifts, whatever the weights are. Under the rule gated, those "
        f"after a drift begin to count at {LEAST:g} and count in full at {LEAST + 1 / SLOPE:g}."
    ),
    ("policy/clip_fraction", "clipping", "Clip fraction", TOKEN_SHARE): (
        "Tokens at the PPO clip. Above a fifth or so, an update moves further than its data supports."
    ),
    ("policy/approx_kl", "policy-kl", "Move within a step", Axis("KL, nats per token", zero=True)): (
        "Approximate KL of the updated policy to the one that wrote the rollouts. Not the distance to the teacher."
    ),
    ("rollout/length_mean", "length", "Answer length", TOKENS): "Mean tokens of a response.",
    ("tokens_written", "written", "Tokens written", TOKENS): "Response tokens of all answers of a step.",
    ("rollout/stopped", "stopped", "Stopped", Axis("answers", percent=True, zero=True)): (
        "Answers that ended at their horizon: what would have followed is not needed. They are not cut off."
    ),
    ("rollout/truncated", "truncation", "Cut off", Axis("answers", percent=True, zero=True)): (
        "Answers that reached the length limit. Their last tokens are no endings."
    ),
    ("rollout/entropy_sampled", "entropy", "Entropy", Axis("nats per token", zero=True)): (
        "Single-sample estimate of the student's entropy. A fall to zero means that sampling has stopped exploring."
    ),
    ("teacher/floored", "floored", "Impossible tokens", TOKENS): "Tokens that the teacher gives no probability.",
    ("update/skipped", "skipped", "Skipped updates", Axis("updates", zero=True)): "Left out: loss or gradient was not finite.",
    ("throughput/tokens_per_second", "throughput", "Throughput", Axis("tokens per second", zero=True)): (
        "Response tokens by whole step."
    ),
}
"""Metric, id, title and axis: caption."""
STAGES = ("rollout", "teacher", "signal", "update")
STAGES_CAPTION = (
    "Mean seconds of a step: writing answers, scoring them, making the signal, updating. Runs that shared the machine slow "
    "each other down, so compare the parts of a bar rather than the bars. Evaluations and checkpoints are not in it."
)


def build(data: ReportData) -> Panel | None:
    if not data.runs:
        return None
    if not any(run.metrics for run in data.runs):
        data.notes.add("training health", "no run has metrics")
        return None
    charts: list[Chart] = []
    quiet: list[str] = []
    for (metric, name, title, axis), caption in CURVES.items():
        chart = metric_chart(data.groups, metric, f"health-{name}", title, axis, caption)
        values = [] if chart is None else all_values(chart.series)
        if values and max(values) == min(values):
            quiet.append(f"{title.lower()} {values[0]:.4g}{' %' if axis.percent else ''}")
        elif chart is not None:
            charts.append(chart)
    charts += _stages(data)
    return Panel(
        "health",
        "Training health",
        "Was the training sound? These numbers warn of a broken run; they do not tell which method is better.",
        tuple(charts),
        "health.html.j2",
        {
            "rows": [_row(group) for group in data.groups if any(run.metrics for run in group.runs)],
            "quiet": quiet,
            "alerts": sum(len(find_alerts(run.metrics)) for run in data.runs),
            "watched": [title.lower() for title, _, _ in CHECKS.values()],
            "cut_share": CUT_SHARE,
        },
    )


def _row(group: Group) -> dict[str, Any]:
    """One line of the table at a glance, over all seeds of a group."""
    records = [record for run in group.runs for record in run.metrics]

    def values(name: str) -> list[float]:
        return [value for record in records if (value := number(record.get(name))) is not None]

    def total(name: str) -> float | None:
        return sum(found) if (found := values(name)) else None

    def mean(name: str) -> float | None:
        return sum(found) / len(found) if (found := values(name)) else None

    return {
        "label": group.label,
        "style": group.style,
        "steps": ", ".join(f"{run.step} of {run.steps}" if run.steps else str(run.step) for run in group.runs),
        "skipped": total("update/skipped"),
        "clip": max(values("policy/clip_fraction"), default=None),
        "gradient": max(values("grad_norm"), default=None),
        "truncated": mean("rollout/truncated"),
        "length": mean("rollout/length_mean"),
        "floored": total("teacher/floored"),
        "seconds": mean("time/step"),
    }


def _stages(data: ReportData) -> list[Chart]:
    """Seconds of a mean step by stage, one bar per group."""
    means: dict[str, list[float]] = {stage: [] for stage in STAGES}
    labels = []
    for group in data.groups:
        columns = {
            stage: [value for run in group.runs for value in run.column(f"time/{stage}")[1] if value is not None]
            for stage in STAGES
        }
        if any(columns.values()):
            labels.append(group.label)
            for stage, column in columns.items():
                means[stage].append(sum(column) / len(column) if column else 0.0)
    if not labels:
        return []
    series = tuple(Series(stage, place, range(len(labels)), means[stage]) for place, stage in enumerate(STAGES))
    axes = Axis("seconds per step", zero=True), Axis("")
    return [Chart("health-stages", "Time by stage", *axes, series, STAGES_CAPTION, kind="stack", bars=tuple(labels))]

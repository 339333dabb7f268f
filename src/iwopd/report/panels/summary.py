"""Which method came out where, and is a difference real? The statistics are those of `analysis.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from iwopd.analysis.compare import Comparison, Difference, compare
from iwopd.analysis.wording import sentence
from iwopd.eval.statistics import holm
from iwopd.report.charts import Panel
from iwopd.report.gathering import ReportData, TaskCurve
from iwopd.report.headline import LEVEL, Fall, fall_words, find_fall, headline, judge_gains, learned_words, winner_words
from iwopd.report.panels import handoff
from iwopd.report.series import interval, score_key
from iwopd.runs.evaluations import ResultsError, TaskResults
from iwopd.runs.results import ModelResults
from iwopd.types import EvalResult

Side = tuple[str, TaskCurve, int]
"""Name, curve and step."""
BEFORE = "before training"
_memory: dict[str, Comparison] = {}  # `--watch` asks for the same comparisons again and again


def build(data: ReportData) -> Panel | None:
    """With the hand-off curve, where there is one: it is the finding that everything else is about."""
    if not data.runs:
        return None
    fall = find_fall(data)
    tables = [_table(task, curves, data, fall if len(data.tasks) == 1 else None) for task, curves in data.tasks.items()]
    seeds = {run.seed for run in data.runs if run.seed is not None}
    counts = {"run": len(data.runs), "method": len(data.groups), "seed": len(seeds)}
    facts = [f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items()]
    position = "" if fall is None else fall_words(fall)
    words = {"headline": headline(fall, tables), "position": position, "facts": facts, "several_seeds": len(seeds) > 1}
    charts = tuple(handoff.charts(data.compared, data.handoff))
    return Panel("summary", "Summary", "", charts, "summary.html.j2", {"tables": tables, **words})


def _table(task: str, curves: Sequence[TaskCurve], data: ReportData, fall: Fall | None) -> dict[str, Any]:
    reference = next((curve for curve in curves if curve.group.label == "OPD"), curves[0])
    pairs = {curve.group.label: against(task, curve, reference, data) for curve in curves if curve is not reference}
    whole = _together([pair for pair in pairs.values() if pair is not None])
    differences = {one.group: one for one in whole.differences} if whole else {}
    before = fall.student[0] if fall is not None and fall.student is not None else None
    lead = fall.teacher[0] - before if fall is not None and fall.teacher is not None and before is not None else None
    gains = {curve.group.label: _gain(task, curve, data) for curve in curves}
    learned = judge_gains(gains, lead)
    rows = []
    for curve in curves:
        last = curve.steps[-1]
        difference = differences.get(curve.group.label)
        step = _common_step(curve, reference)
        row = {
            "label": curve.group.label,
            "style": curve.group.style,
            "runs": len(curve.by_seed[last]),
            "step": last,
            "start": interval(curve.scores(0)) if 0 in curve.steps else None,
            "final": interval(curve.scores(last)),
            "gain": gains[curve.group.label],
            "learned": learned[curve.group.label],
            "difference": difference,
            "early": step if difference is not None and step != max(last, reference.steps[-1]) else None,
            "verdict": "reference" if curve is reference else _verdict(difference),
        }
        rows.append(row)
    return {
        "task": task,
        "reference": reference.group.label,
        "rows": rows,
        "problems": len(reference.problem_ids),
        "findings": {"Learned": learned_words(rows), "Winner": winner_words(rows, reference.group.label)},
        "start": rows[0]["start"] if len({row["start"] for row in rows}) == 1 else None,
        "step": rows[0]["step"] if len({row["step"] for row in rows}) == 1 else None,
        "teacher": None if fall is None else fall.teacher,
        "sentences": [sentence(one, whole) for one in whole.differences] if whole else [],
        "notes": list(dict.fromkeys(note for pair in pairs.values() if pair for note in pair.notes)),
        "sandboxes": sorted({used for curve in curves for run in curve.group.runs for used in run.sandboxes.get(task, ())}),
        "compared": len(whole.differences) if whole else 0,
    }


def against(task: str, curve: TaskCurve, reference: TaskCurve, data: ReportData) -> Comparison | None:
    """At the last step that both have; None where the two cannot be compared."""
    step = _common_step(curve, reference)
    if step is None:
        data.notes.add(curve.group.label, f"no trained step in common with {reference.group.label}: not compared on {task!r}")
        return None
    if step < max(curve.steps[-1], reference.steps[-1]):
        data.notes.add(curve.group.label, f"compared with {reference.group.label} at step {step}, the last that both reached")
    return _compared(task, (reference.group.label, reference, step), (curve.group.label, curve, step), data)


def _common_step(curve: TaskCurve, reference: TaskCurve) -> int | None:
    """The last step, after training began, at which both were evaluated."""
    return max((set(curve.steps) & set(reference.steps)) - {0}, default=None)


def _gain(task: str, curve: TaskCurve, data: ReportData) -> Difference | None:
    """Against the student before training."""
    last = curve.steps[-1]
    if 0 not in curve.steps or last == 0:
        return None
    found = _compared(task, (BEFORE, curve, 0), (curve.group.label, curve, last), data)
    return found.differences[0] if found else None


def _compared(task: str, base: Side, other: Side, data: ReportData) -> Comparison | None:
    results = [(name, one) for name, curve, step in (base, other) for one in _results(task, curve, step)]
    key = repr([(name, one.step, one.path, one.seed, score_key(one.tasks[task].result.scores)) for name, one in results])
    try:
        if key not in _memory:
            _memory[key] = compare(results, baseline=base[0], tasks=[task])
        return _memory[key]
    except ResultsError as error:
        data.notes.add("comparison", str(error))
        return None


def _results(task: str, curve: TaskCurve, step: int) -> list[ModelResults]:
    """What `compare` takes: one per seed. Groups are given by name, so that recipe and student need not tell them apart."""
    paths = {run.seed: run.path for run in curve.group.runs}
    found = []
    for seed, scores in curve.by_seed[step].items():
        tasks = {task: TaskResults(EvalResult(task, curve.problem_ids, scores, step))}
        member: Any = {"path": paths[seed], "seed": seed, "step": step, "tasks": tasks}
        found.append(ModelResults(kind="run", method=curve.group.label, student=None, settings={}, recipe={}, **member))
    return found


def _together(pairs: Sequence[Comparison]) -> Comparison | None:
    """Comparisons of pairs as one table, with p corrected for all of them."""
    differences = [one for pair in pairs for one in pair.differences]
    if not differences:
        return None
    corrected = holm([one.p_value for one in differences])
    return replace(pairs[0], differences=tuple(replace(one, holm=p) for one, p in zip(differences, corrected, strict=True)))


def _verdict(difference: Difference | None) -> str:
    if difference is None:
        return "not comparable"
    if difference.holm < LEVEL:
        return "higher" if difference.interval.mean > 0 else "lower"
    return "no difference shown"

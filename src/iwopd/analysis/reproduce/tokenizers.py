"""`iwopd reproduce tokenizers`: the same student, taught by a teacher with its own tokenizer and by one with another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import iwopd
from iwopd import tiny
from iwopd.analysis.reproduce.effects import Effect
from iwopd.analysis.reproduce.records import Records
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import NOT_RUN, Table, in_words
from iwopd.analysis.reproduce.variants import OPD, Variant
from iwopd.eval.session import Request, run_evaluation
from iwopd.stages import StageListener

FOREIGN = replace(OPD, title=f"{OPD.title}, teacher with another tokenizer", models={"teacher_tokenizer": "pieces"})
TESTED = (OPD, FOREIGN)
LOSS = 3.0
"""Points that the other tokenizer may cost on average."""
TASKS = {"clean": "tiny", "drift": "tiny-drift"}
"""What teachers are asked by themselves, by world."""


def world_of(runs: Runs, variant: Variant, lineage: int) -> tiny.WorldRecipe:
    """The models of a run."""
    names = {name.removesuffix("_size"): value for name, value in variant.models.items()}
    return tiny.world_recipe(runs.world, lineage=lineage, **names)


def teacher_accuracy(runs: Runs, variant: Variant, lineage: int) -> float:
    """Of the teacher by itself on the problems of the runs, at temperature 1, in percent; recorded. NaN: not to be asked."""
    recipe = world_of(runs, variant, lineage)
    folder, task = tiny.planned_world(recipe).teacher, TASKS[runs.world]
    records = Records(runs.results / "teachers.jsonl") if runs.results else None
    key = f"{runs.world}-{lineage}-{folder.name}-{runs.problems}"
    known = records.read().get(key) if records else None
    if known is not None:
        return float(known["accuracy"])
    if runs.read_only:
        return math.nan
    tiny.open_world(recipe)
    request = Request(str(folder), [task], limit=runs.problems)
    found = run_evaluation(request, runs.root / "teachers" / folder.name, StageListener())
    accuracy = round(100.0 * float(torch.tensor(found[task]["scores"], dtype=torch.float64).mean()), 3)
    if records:
        place = {"world": runs.world, "lineage": lineage, "title": variant.title, "problems": runs.problems}
        records.add([{"key": key, **place, "accuracy": accuracy, "iwopd": iwopd.__version__}])
    return accuracy


def by_lineage_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Lineage by lineage: both teachers by themselves, and their student at each step."""
    rows, numbers = [], {}
    for variant in TESTED:
        alone = [teacher_accuracy(runs, variant, lineage) for lineage in runs.lineages]
        means = {step: list(runs.by_lineage(variant, step).values()) for step in (0, *steps)}
        rows.append([variant.title, _listed(alone), *(_listed(values) for values in means.values())])
        numbers[variant.title] = {"teacher": alone, "student": means}
    columns = ["accuracy, by lineage", "teacher alone", "student, untrained", *(f"step {step}" for step in steps)]
    return Table(columns, rows), numbers


def registered(runs: Runs, steps: Sequence[int]) -> list[str]:
    """Another tokenizer minus the student's own, at each step. Lineages are the units."""
    words = []
    for step in steps:
        effect = runs.effect(FOREIGN, OPD, step)
        what = f"Teacher with another tokenizer minus the student's own at step {step}"
        words.append(in_words(what, effect, _verdict(effect)))
    return words


def _verdict(effect: Effect) -> str:
    low, mean, high = effect.interval.low, effect.interval.mean, effect.interval.high
    as_well = high >= 0 and mean > -LOSS
    bar = f"bar (interval not below zero, mean loss below {LOSS:g} points) {'met' if as_well else 'missed'}"
    kept = "excludes" if low > -LOSS else "does not exclude"
    return f"{bar}; the interval {kept} a loss of more than {LOSS:g} points"


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values if not math.isnan(value)) or NOT_RUN

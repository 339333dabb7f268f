"""`iwopd reproduce tokenizers`: the same student, taught by a teacher with its own tokenizer and by one with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from iwopd import tiny
from iwopd.analysis.reproduce.horizons import by_lineage, over_lineages
from iwopd.analysis.reproduce.runs import Effect, Runs
from iwopd.analysis.reproduce.tables import Table
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
    """Of the teacher by itself on the problems of the runs, at temperature 1, in percent; kept beside the runs."""
    folder = tiny.planned_world(world_of(runs, variant, lineage)).teacher
    task = TASKS[runs.world]
    request = Request(str(folder), [task], limit=runs.problems)
    found = run_evaluation(request, runs.root / "teachers" / folder.name, StageListener())
    return 100.0 * float(torch.tensor(found[task]["scores"], dtype=torch.float64).mean())


def by_lineage_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Lineage by lineage: both teachers by themselves, and their student at each step."""
    rows, numbers = [], {}
    for variant in TESTED:
        alone = [teacher_accuracy(runs, variant, lineage) for lineage in runs.lineages]
        means = {step: _by_lineage(runs, variant, step) for step in (0, *steps)}
        rows.append([variant.title, _listed(alone), *(_listed(values) for values in means.values())])
        numbers[variant.title] = {"teacher": alone, "student": means}
    columns = ["accuracy, by lineage", "teacher alone", "student, untrained", *(f"step {step}" for step in steps)]
    return Table(columns, rows), numbers


def registered(runs: Runs, steps: Sequence[int]) -> list[str]:
    """Another tokenizer minus the student's own, at each step. Lineages are the units."""
    words = []
    for step in steps:
        effect = by_lineage(runs, FOREIGN, runs, OPD, step)
        words.append(
            f"Teacher with another tokenizer minus the student's own at step {step}: {over_lineages(effect, _verdict(effect))}"
        )
    return words


def _verdict(effect: Effect) -> str:
    low, mean, high = effect.interval.low, effect.interval.mean, effect.interval.high
    as_well = high >= 0 and mean > -LOSS
    bar = f"bar (interval not below zero, mean loss below {LOSS:g} points) {'met' if as_well else 'missed'}"
    kept = "excludes" if low > -LOSS else "does not exclude"
    return f"{bar}; the interval {kept} a loss of more than {LOSS:g} points"


def _by_lineage(runs: Runs, variant: Variant, step: int) -> list[float]:
    """Seeds averaged, in percent."""
    values: list[float] = runs.scores(variant, step).mean(1).view(len(runs.lineages), -1).mean(1).mul(100).tolist()
    return values


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)

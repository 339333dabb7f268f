"""Compare models on the same problems: paired differences, and what they mean in words.

    results --group--> one group per method (its training seeds) --align--> the problems that all have
            --> score of each group, difference of each group to its baseline, notes on everything that does not match

The unit is the problem, or what runs share (`units`); pairs are formed by (task, seed, problem). One group of each student is
the baseline.
`docs/evaluation.md` has the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iwopd.analysis.pairing import (
    Group,
    Metric,
    Side,
    align,
    baselines,
    choose_tasks,
    group_results,
    note_settings,
    pair_in_units,
    pair_seeds,
)
from iwopd.analysis.units import Units
from iwopd.eval import statistics
from iwopd.eval.statistics import Crossed, Interval, SamplingNoise, Term, UnitEffect
from iwopd.runs.evaluations import ResultsError
from iwopd.runs.results import ModelResults

AVERAGE = "Avg"
POWER = 0.8
POINT = 0.01
ONE_SEED = (
    "One training seed a side: intervals and p-values are about these models, not about the methods. Another training seed can "
    "move a score by more than the interval; give several runs of each method to cover it."
)


@dataclass(frozen=True)
class Score:
    over_problems: Interval
    over_seeds: Interval | None = None
    """Over seeds and problems; None with one seed."""
    over_units: Interval | None = None
    """Where units were asked for; bounds are NaN with too few of them."""

    @property
    def interval(self) -> Interval:
        return self.over_units or self.over_seeds or self.over_problems


@dataclass(frozen=True)
class Needed:
    """What would find `difference` with 80 % power, each alone; None: no number of it is enough (or it cannot be told)."""

    difference: float
    samples: float | None
    problems: float | None
    seeds: float | None


@dataclass(frozen=True)
class Difference:
    """Group minus baseline on one task (or `Avg`), in the units of the scores."""

    group: str
    baseline: str
    student: str | None
    task: str
    problems: int
    differing: int
    """Problems on which the two differ at all."""
    samples: int
    """Per problem; the fewer, if they differ."""
    seeds: int
    over_problems: Interval
    p_problems: float
    over_seeds: Interval | None
    p_seeds: float | None
    cancelled: float | None
    """Share of the sampling noise that matched seeds take out of the difference."""
    needed: tuple[Needed, ...]
    """For a difference of the observed size and for one point. For `Avg` as multiples of what there is."""
    holm: float = math.nan
    """The deciding p-value, corrected for all comparisons of the table."""
    over_units: UnitEffect | None = None
    """Where units were asked for: seeds averaged within each."""

    @property
    def interval(self) -> Interval:
        if self.over_units is not None:
            return self.over_units.interval
        return self.over_seeds or self.over_problems

    @property
    def too_few(self) -> bool:
        """Whether there are units, and not enough for an interval or a verdict."""
        return self.over_units is not None and not self.over_units.enough

    @property
    def p_value(self) -> float:
        """The one that decides: over units where there are some, over seeds and problems with several seeds, else problems."""
        if self.over_units is not None:
            return self.over_units.p_value
        return self.p_problems if self.p_seeds is None else self.p_seeds


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    level: float
    tasks: tuple[str, ...]
    groups: tuple[Group, ...]
    baselines: Mapping[int, int]
    """Place of each group that is compared --> place of its baseline."""
    scores: Mapping[tuple[int, str], Score]
    """(place of the group, task or `Avg`)."""
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    unit: str | None = None
    """What names the units, if there are some."""


def compare(
    results: Sequence[tuple[str | None, ModelResults]],
    *,
    metric: str = "mean",
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    level: float = 0.95,
    units: Units | None = None,
) -> Comparison:
    """Compare results; a name given with one replaces its method's title, and equal names are seeds of one method.

    With `units`, seeds are averaged within a unit, and intervals and p-values are over units.
    """
    if not 0.5 <= level < 1:
        raise ResultsError(f"level {level} is not a confidence level: use a number like 0.95")
    measure = Metric.parse(metric)
    notes: list[str] = []
    if units is not None:
        units.check([result for _, result in results])
    groups = group_results(results, notes, units)
    bases = baselines(groups, baseline, notes)
    aligned = {task: align(task, groups, measure, notes) for task in choose_tasks(groups, tasks)}
    shared = [task for task, data in aligned.items() if len(data) == len(groups)]
    columns = [(task, [data]) for task, data in aligned.items()]
    if len(shared) > 1:
        columns.append((AVERAGE, [aligned[task] for task in shared]))
        if len(shared) < len(aligned):
            notes.append(f"{AVERAGE} is over the tasks that all have: {', '.join(shared)}")

    scores, differences = {}, []
    for task, data in columns:
        for place in range(len(groups)):
            if all(place in part for part in data):
                scores[place, task] = _score([part[place].values for part in data], level, groups[place].units)
    for place, base in bases.items():
        pairs = (pair_in_units if units else pair_seeds)(groups[base], groups[place], notes)
        places = [groups[base].units[one] for one, _ in pairs] if units else None
        note_settings(groups[base], groups[place], pairs, notes)
        for task, data in columns:
            if all(place in part and base in part for part in data):
                sides = [_paired(part[base], part[place], pairs) for part in data]
                differences.append(_difference(task, groups[place], groups[base], sides, measure, level, places))
    judged = [place for place, difference in enumerate(differences) if not difference.too_few]
    corrected = dict(zip(judged, statistics.holm([differences[place].p_value for place in judged]), strict=True))
    differences = [replace(difference, holm=corrected.get(place, 1.0)) for place, difference in enumerate(differences)]
    if not differences:
        raise ResultsError("nothing to compare: no task that a group and its baseline both have")
    if units is None and any(difference.seeds == 1 for difference in differences):
        notes.append(ONE_SEED)
    unique = tuple(dict.fromkeys(notes))
    return Comparison(
        measure, level, tuple(aligned), tuple(groups), bases, scores, tuple(differences), unique, units.title if units else None
    )


def _by_unit(strata: list[Tensor], units: Sequence[str], level: float) -> UnitEffect:
    """Over units, of values [S, N] of each task: tasks weigh the same, seeds are averaged within a unit."""
    by_run = torch.stack([values.double().mean(1) for values in strata]).mean(0).tolist()
    gathered: dict[str, list[float]] = {}
    for unit, value in zip(units, by_run, strict=True):
        gathered.setdefault(unit, []).append(value)
    found = statistics.over_units([sum(values) / len(values) for values in gathered.values()], level=level)
    return found if found.enough else found._replace(interval=Interval(found.interval.mean, math.nan, math.nan), p_value=1.0)


def _score(strata: list[Tensor], level: float, units: Sequence[str] = ()) -> Score:
    """`strata`: values [S, N] of each task; `units` of the S runs."""
    over_problems = statistics.interval_over_problems([values.mean(0) for values in strata], level=level)
    both = statistics.crossed(strata)
    over_units = None
    if units:
        mean, low, high = _by_unit(strata, units, level).interval
        over_units = Interval(mean, *(bound if math.isnan(bound) else min(1.0, max(0.0, bound)) for bound in (low, high)))
    return Score(over_problems, None if both is None else both.interval(level, (0.0, 1.0)), over_units)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A group and its baseline on one task, seed by seed."""

    differences: Tensor  # [S, N]
    samples: list[tuple[Tensor, Tensor]]
    noises: list[SamplingNoise]
    """Of the seeds for which it is known."""


def _paired(base: Side, side: Side, pairs: Sequence[tuple[int, int]]) -> _Pair:
    differences = torch.stack([side.values[two] - base.values[one] for one, two in pairs])
    samples = [(base.samples[one], side.samples[two]) for one, two in pairs]
    noises = [noise for pair in samples if (noise := statistics.sampling_noise(*pair)) is not None]
    return _Pair(differences, samples, noises)


def _difference(
    task: str, group: Group, base: Group, sides: list[_Pair], metric: Metric, level: float, units: Sequence[str] | None
) -> Difference:
    strata = [side.differences for side in sides]
    per_problem = [values.mean(0) for values in strata]
    both = statistics.crossed(strata)
    known = [noise.cancelled for side in sides for noise in side.noises]
    return Difference(
        group=group.name,
        baseline=base.name,
        student=group.student,
        task=task,
        problems=sum(len(values) for values in per_problem),
        differing=sum(int((values != 0).sum()) for values in per_problem),
        samples=min(scores.shape[1] for side in sides for pair in side.samples for scores in pair),
        seeds=len(strata[0]),
        over_problems=statistics.interval_over_problems(per_problem, bounds=(-1.0, 1.0), level=level),
        p_problems=statistics.sign_flip_p(per_problem),
        over_seeds=None if both is None else both.interval(level, (-1.0, 1.0)),
        p_seeds=None if both is None else both.p_value,
        cancelled=sum(known) / len(known) if known and metric.averages_samples else None,
        needed=_needed(sides, both, metric, level) if units is None else (),
        over_units=None if units is None else _by_unit(strata, units, level),
    )


def _needed(sides: list[_Pair], both: Crossed | None, metric: Metric, level: float) -> tuple[Needed, ...]:
    """How many samples, problems or seeds would find the observed difference, and one point."""
    per_problem = [side.differences.mean(0) for side in sides]
    if any(len(values) < 2 for values in per_problem) or all(bool((values == values[0]).all()) for values in per_problem):
        return ()
    parts = [float(values.var()) / len(values) / len(sides) ** 2 for values in per_problem]
    total = sum(parts)
    df = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, per_problem, strict=True))
    seeds = len(sides[0].samples)
    sampling = 0.0
    for side in sides if metric.averages_samples else ():
        count = side.differences.shape[1] * (seeds * len(sides)) ** 2
        sampling += sum(noise.variance for noise in side.noises) / count
    sampling = min(sampling, total)
    single = len(sides) == 1  # an average over tasks is counted in multiples of what there is
    problems = float(len(per_problem[0])) if single else 1.0
    samples = float(min(scores.shape[1] for pair in sides[0].samples for scores in pair)) if single else 1.0
    seeds_now = [Term(both.seeds, 0.0, lambda _: seeds - 1.0)] if both else []

    def find(difference: float) -> Needed:
        def ask(now: float, *terms: Term) -> float | None:
            return statistics.needed(difference, terms, now, alpha=1.0 - level, power=POWER)

        more_problems = Term(0.0, total, (lambda x: x - 1.0) if single else (lambda _: df))
        more_seeds = Term(0.0, both.seeds, lambda x: x - 1.0) if both else None
        return Needed(
            difference,
            ask(samples, Term(total - sampling, sampling, lambda _: df), *seeds_now) if sampling else None,
            ask(problems, more_problems, *seeds_now),
            ask(seeds, Term(total - both.rest, both.rest, lambda _: df), more_seeds) if both and more_seeds else None,
        )

    observed = abs(sum(float(values.mean()) for values in per_problem) / len(sides))
    return tuple(find(difference) for difference in (observed, POINT) if difference > 1e-9)

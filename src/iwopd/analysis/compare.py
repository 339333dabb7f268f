"""Compare models on the same problems: paired differences, and what they mean in words.

    results --group--> one group a method (its training seeds) --align--> the problems that all have
            --> score of each group, difference of each group to its baseline, notes on everything that does not match

The unit is the problem, pairs are formed by (task, seed, problem). One group of each student is the baseline.
`docs/evaluation.md` has the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from iwopd.eval import statistics
from iwopd.eval.results import ModelResults, ResultsError, TaskResults
from iwopd.eval.statistics import Crossed, Interval, Term

AVERAGE = "Avg"
POWER = 0.8
POINT = 0.01


# --- what comes out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """What a problem's samples are worth: `mean`, `best@8`, `pass@1`, `majority@32` (`majority`: of all samples)."""

    kind: Literal["mean", "best", "pass", "majority"]
    k: int | None = None

    @classmethod
    def parse(cls, text: str) -> Metric:
        kind, at, number = text.partition("@")
        good = (number.isdecimal() and int(number) >= 1) if at else kind in ("mean", "majority")
        if kind not in ("mean", "best", "pass", "majority") or not good:
            raise ResultsError(f"unknown metric {text!r}: use mean, best@K, pass@K or majority@K with K samples, e.g. best@8")
        return cls(kind, int(number) if at else None)  # type: ignore[arg-type]  # checked above

    def __str__(self) -> str:
        return self.kind if self.k is None else f"{self.kind}@{self.k}"

    def per_problem(self, task: TaskResults, owner: str) -> Tensor:
        """[N] values in [0, 1]."""
        scores, name = task.result.scores, task.result.task
        if self.kind == "majority" and task.answers is None:
            raise ResultsError(f"{self} needs answers to vote on, and {name} of {owner} has none: leave it out with --tasks")
        try:
            if self.kind == "best":
                return statistics.best_at(scores, self.k or 1)
            if self.kind == "pass":
                return statistics.pass_at(scores, self.k or 1)
            if self.kind == "majority":
                return statistics.majority_at(scores, task.answers or (), self.k)
            statistics.best_at(scores, self.k or 1)  # mean@k of more samples than there are is refused like the others
            return statistics.mean_at(scores)
        except ValueError as error:
            raise ResultsError(f"{self} on {name} of {owner}: {error}") from None

    @property
    def averages_samples(self) -> bool:
        """Whether a problem's value is a plain mean of its samples, so that its sampling noise falls as 1 / K."""
        return self.kind == "mean" or (self.kind in ("best", "pass") and self.k == 1)


@dataclass(frozen=True)
class Group:
    """The training seeds of one method with one student."""

    name: str
    student: str | None
    members: tuple[ModelResults, ...]


@dataclass(frozen=True)
class Score:
    over_problems: Interval
    over_seeds: Interval | None = None
    """Over seeds and problems; None with one seed."""

    @property
    def interval(self) -> Interval:
        return self.over_seeds or self.over_problems


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

    @property
    def interval(self) -> Interval:
        return self.over_seeds or self.over_problems

    @property
    def p_value(self) -> float:
        """The one that decides: over seeds and problems where there are several seeds, else over problems."""
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


# --- the comparison --------------------------------------------------------------------------------------------------


def compare(
    results: Sequence[tuple[str | None, ModelResults]],
    *,
    metric: str = "mean",
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    level: float = 0.95,
) -> Comparison:
    """Compare results; a name given with one replaces its method's title, and equal names are seeds of one method."""
    if not 0.5 <= level < 1:
        raise ResultsError(f"level {level} is not a confidence level: use a number like 0.95")
    measure = Metric.parse(metric)
    notes: list[str] = []
    groups = group_results(results, notes)
    baselines = _baselines(groups, baseline, notes)
    aligned = {task: _align(task, groups, measure, notes) for task in _choose_tasks(groups, tasks)}
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
                scores[place, task] = _score([part[place].values for part in data], level)
    for place, base in baselines.items():
        pairs = _pair_seeds(groups[base], groups[place], notes)
        _note_settings(groups[base], groups[place], pairs, notes)
        for task, data in columns:
            if all(place in part and base in part for part in data):
                sides = [_Pair.of(part[base], part[place], pairs) for part in data]
                differences.append(_difference(task, groups[place], groups[base], sides, measure, level))
    corrected = statistics.holm([difference.p_value for difference in differences])
    differences = [replace(difference, holm=p) for difference, p in zip(differences, corrected, strict=True)]
    if not differences:
        raise ResultsError("nothing to compare: no task that a group and its baseline both have")
    if any(difference.seeds == 1 for difference in differences):
        notes.append(
            "One training seed a side: intervals and p-values are about these models, not about the methods. Another training "
            "seed can move a score by more than the interval; give several runs of each method to cover it."
        )
    unique = tuple(dict.fromkeys(notes))
    return Comparison(measure, level, tuple(aligned), tuple(groups), baselines, scores, tuple(differences), unique)


def _score(strata: list[Tensor], level: float) -> Score:
    """`strata`: values [S, N] of each task."""
    over_problems = statistics.interval_over_problems([values.mean(0) for values in strata], level=level)
    both = statistics.crossed(strata)
    return Score(over_problems, None if both is None else both.interval(level, (0.0, 1.0)))


@dataclass(frozen=True, eq=False)
class _Side:
    """One group on one task, on the problems that all groups have."""

    values: Tensor
    """[S, N] the metric."""
    samples: list[Tensor]
    """S times [N, K]: the scores; K may differ."""


@dataclass(frozen=True, eq=False)
class _Pair:
    """A group and its baseline on one task, seed by seed."""

    differences: Tensor
    """[S, N]."""
    samples: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, base: _Side, side: _Side, pairs: Sequence[tuple[int, int]]) -> _Pair:
        values = torch.stack([side.values[two] - base.values[one] for one, two in pairs])
        return cls(values, [(base.samples[one], side.samples[two]) for one, two in pairs])


def _difference(task: str, group: Group, base: Group, sides: list[_Pair], metric: Metric, level: float) -> Difference:
    strata = [side.differences for side in sides]
    per_problem = [values.mean(0) for values in strata]
    both = statistics.crossed(strata)
    noises = [statistics.sampling_noise(*pair) for side in sides for pair in side.samples]
    known = [noise for noise in noises if noise is not None]
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
        cancelled=sum(noise.cancelled for noise in known) / len(known) if known and metric.averages_samples else None,
        needed=_needed(sides, both, metric, level),
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
    for side in sides:
        noises = [statistics.sampling_noise(*pair) for pair in side.samples] if metric.averages_samples else []
        count = side.differences.shape[1] * (seeds * len(sides)) ** 2
        sampling += sum(noise.variance for noise in noises if noise is not None) / count
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


# --- who is compared with whom ---------------------------------------------------------------------------------------


def group_results(results: Sequence[tuple[str | None, ModelResults]], notes: list[str]) -> list[Group]:
    """Results of equal name (or equal method) and student are the seeds of one group, in the order of first appearance."""
    gathered: dict[tuple[str, str | None], list[tuple[bool, ModelResults]]] = {}
    for name, result in results:
        gathered.setdefault((name or result.method, result.student), []).append((name is not None, result))
    groups = []
    for (name, student), found in gathered.items():
        members = [result for _, result in found]
        for earlier, result in enumerate(members[1:]):
            twin = next((m for m in members[: earlier + 1] if m.seed is not None and m.seed == result.seed), None)
            if twin is not None:
                raise ResultsError(
                    f"{twin.path} and {result.path} are both {name} with seed {result.seed}; if they are different methods, "
                    "name them: A=PATH B=PATH"
                )
            changed = _changed(members[0], result)
            if changed and not all(named for named, _ in found):
                raise ResultsError(
                    f"{members[0].path} and {result.path} are both {name}, but differ in {', '.join(changed)}; name them to "
                    "compare them (A=PATH B=PATH), or give both the same name to count them as seeds of one method"
                )
            if changed:
                notes.append(f"The runs of {name} differ in more than the seed: {', '.join(changed)}")
        groups.append(Group(name, student, tuple(members)))
    if len(groups) < 2:
        raise ResultsError(
            f"all results belong to one group ({groups[0].name}): nothing to compare; name them apart with A=PATH B=PATH"
            if groups
            else "no results were given"
        )
    return groups


def _changed(first: ModelResults, second: ModelResults) -> list[str]:
    """Training settings in which two members of a group differ; of untrained students only the models count."""
    names = [*first.recipe, *(name for name in second.recipe if name not in first.recipe)]
    untrained = first.step == 0 and second.step == 0
    changed = [name for name in names if first.recipe.get(name) != second.recipe.get(name)]
    changed = [name for name in changed if name.startswith("models.") or not untrained]
    steps = [] if first.step == second.step else [f"step ({first.step} and {second.step})"]
    return (changed if first.recipe and second.recipe else []) + steps


def _baselines(groups: Sequence[Group], baseline: str | None, notes: list[str]) -> dict[int, int]:
    """Each group's baseline: of the same student, the first or the one called `baseline`."""
    names = [group.name for group in groups]
    if baseline is not None and baseline not in names:
        raise ResultsError(f"no group is called {baseline!r}; there are: {', '.join(dict.fromkeys(names))}")
    students: dict[str | None, list[int]] = {}
    for place, group in enumerate(groups):
        students.setdefault(group.student, []).append(place)
    if None in students or all(len(places) == 1 for places in students.values()):
        students = {None: list(range(len(groups)))}  # no two methods of one student: compare across students
    found: dict[int, int] = {}
    for student, places in students.items():
        candidates = [place for place in places if baseline in (None, names[place])]
        if not candidates:
            notes.append(f"{student} has no {baseline}: its groups are not compared")
            continue
        found |= {place: candidates[0] for place in places if place != candidates[0]}
    return found


def _pair_seeds(base: Group, group: Group, notes: list[str]) -> list[tuple[int, int]]:
    """Places of the members that belong together."""
    theirs, ours = [member.seed for member in base.members], [member.seed for member in group.members]
    for lone, other in ((base, group), (group, base)):
        if len(lone.members) == 1 < len(other.members) and (lone.members[0].seed is None or lone.members[0].step == 0):
            notes.append(f"{lone.name} is one model without a training seed: it meets every seed of {other.name}")
            return [(0, place) if lone is base else (place, 0) for place in range(len(other.members))]
    common = [seed for seed in theirs if seed is not None and seed in ours]
    if common:
        if set(ours) != set(theirs):
            listed = "; ".join(f"{name}: {_listed(seeds)}" for name, seeds in ((base.name, theirs), (group.name, ours)))
            notes.append(f"{group.name} and {base.name} are compared on the seeds that both have, {_listed(common)} ({listed})")
        return [(theirs.index(seed), ours.index(seed)) for seed in common]
    count = min(len(ours), len(theirs))
    if len(ours) > 1 or len(theirs) > 1 or None not in (*ours, *theirs):
        which = "" if len(ours) == len(theirs) else f", the first {count} of each"
        notes.append(
            f"Not matched: {group.name} and {base.name} have no training seed in common, or none is recorded; paired in the "
            f"order given{which}"
        )
    return [(place, place) for place in range(count)]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


# --- what is compared ------------------------------------------------------------------------------------------------


def _choose_tasks(groups: Sequence[Group], wanted: Sequence[str] | None) -> list[str]:
    present = list(dict.fromkeys(task for group in groups for member in group.members for task in member.tasks))
    for task in wanted or ():
        if task not in present:
            raise ResultsError(f"no result has the task {task!r}; there are: {', '.join(present)}")
    return list(dict.fromkeys(wanted)) if wanted else present


def _align(task: str, groups: Sequence[Group], metric: Metric, notes: list[str]) -> dict[int, _Side]:
    """Every group that has the task, on the problems that all of them have."""
    members: dict[int, list[tuple[ModelResults, TaskResults]]] = {}
    for place, group in enumerate(groups):
        having = [(member, member.tasks[task]) for member in group.members if task in member.tasks]
        if len(having) == len(group.members):
            members[place] = having
        elif having:
            missing = next(member.path for member in group.members if task not in member.tasks)
            notes.append(f"{group.name} is left out of {task}: {missing} does not have it")
    every = [data.result for having in members.values() for _, data in having]
    if not every:
        return {}
    common = set(every[0].problem_ids).intersection(*(result.problem_ids for result in every))
    if not common:
        raise ResultsError(f"{task}: the results have no problem in common; leave it out with --tasks, or evaluate again")
    ids = [problem for problem in every[0].problem_ids if problem in common]
    most = max(len(result.problem_ids) for result in every)
    if len(ids) < most:
        notes.append(
            f"{task}: the results have different problems. ONLY the {len(ids)} that all have are compared, of up to {most}"
        )
    counts = sorted({result.scores.shape[1] for result in every})
    if len(counts) > 1:
        notes.append(f"{task}: not matched, since samples a problem differ ({', '.join(map(str, counts))})")
    sides = {}
    for place, having in members.items():
        values, samples = [], []
        for member, data in having:
            where = {problem: row for row, problem in enumerate(data.result.problem_ids)}
            rows = torch.tensor([where[problem] for problem in ids])
            values.append(metric.per_problem(data, str(member.path))[rows])
            samples.append(data.result.scores[rows])
        sides[place] = _Side(torch.stack(values), samples)
    return sides


def _note_settings(base: Group, group: Group, pairs: Sequence[tuple[int, int]], notes: list[str]) -> None:
    """Say it when two groups were not evaluated in the same way."""
    differing: dict[str, str] = {}
    steps = []
    for one, two in pairs:
        a, b = base.members[one], group.members[two]
        for name in a.settings.keys() & b.settings.keys():
            if a.settings[name] != b.settings[name]:
                differing.setdefault(name, f"{name} ({a.settings[name]} and {b.settings[name]})")
        if a.step and b.step and a.step != b.step:
            steps.append(f"{base.name} is at step {a.step}, {group.name} at step {b.step}")
    if differing:
        listed = ", ".join(differing[name] for name in sorted(differing))
        notes.append(f"Not matched: {base.name} and {group.name} were evaluated with different {listed}")
    notes.extend(dict.fromkeys(steps))

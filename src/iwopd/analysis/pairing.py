"""Who is compared with whom, on what: groups of results, baselines, seeds that belong together, problems that all have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from iwopd.analysis.units import SHARED, Units, warnings
from iwopd.eval import per_problem
from iwopd.runs.evaluations import ResultsError, TaskResults
from iwopd.runs.results import ModelResults


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

    def values(self, task: TaskResults, owner: str) -> Tensor:
        """[N] values in [0, 1]."""
        scores, name = task.result.scores, task.result.task
        if self.kind == "majority" and task.answers is None:
            raise ResultsError(f"{self} needs answers to vote on, and {name} of {owner} has none: leave it out with --tasks")
        try:
            if self.kind == "majority":
                return per_problem.majority_at(scores, task.answers or (), self.k)
            if self.kind == "pass":
                return per_problem.pass_at(scores, self.k or 1)
            best = per_problem.best_at(scores, self.k or 1)  # mean@k of more samples than there are is refused like the others
            return best if self.kind == "best" else per_problem.mean_at(scores)
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
    units: tuple[str, ...] = ()
    """Of each member, where units were asked for."""


@dataclass(frozen=True, eq=False)
class Side:
    """One group on one task, on the problems that all groups have."""

    values: Tensor
    """[S, N] the metric."""
    samples: list[Tensor]
    """S times [N, K]: the scores; K may differ."""


# --- who is compared with whom ---------------------------------------------------------------------------------------


def group_results(
    results: Sequence[tuple[str | None, ModelResults]], notes: list[str], units: Units | None = None
) -> list[Group]:
    """Results of equal name (or equal method) and student are the seeds of one group, in the order of first appearance.

    With units, a group has the seeds of all of them, whatever their students.
    """
    gathered: dict[tuple[str, str | None], list[tuple[bool, ModelResults]]] = {}
    for name, result in results:
        student = result.student if units is None else None
        gathered.setdefault((name or result.method, student), []).append((name is not None, result))
    groups = []
    for (name, student), found in gathered.items():
        members = [result for _, result in found]
        for place, result in enumerate(members[1:], 1):
            same = [m for m in members[:place] if units is None or units.of(m) == units.of(result)]
            twin = next((m for m in same if m.seed is not None and m.seed == result.seed), None)
            if twin is not None:
                differ = f", and differ in {', '.join(changed)}" if (changed := _changed(twin, result)) else ""
                raise ResultsError(
                    f"{twin.path} and {result.path} are both {name} with seed {result.seed}{differ}; if they are different "
                    "methods, name them: A=PATH B=PATH"
                )
            changed = _changed(same[0] if same else members[0], result)
            if units is not None and not same:  # units may have other models, and nothing else
                changed = [name for name in changed if not name.startswith("models.") and name != units.setting]
            if changed and not all(named for named, _ in found):
                raise ResultsError(
                    f"{members[0].path} and {result.path} are both {name}, but differ in {', '.join(changed)}; name them to "
                    "compare them (A=PATH B=PATH), or give both the same name to count them as seeds of one method"
                )
            if changed:
                notes.append(f"The runs of {name} differ in more than the seed: {', '.join(changed)}")
        notes.extend(warnings(name, members) if units is None else ())
        found_units = () if units is None else tuple(units.of(member) for member in members)
        groups.append(Group(name, student, tuple(members), found_units))
    notes.extend(several_students(groups) if units is None else ())
    if not groups:
        raise ResultsError("no results were given")
    if len(groups) == 1:
        only = f"all results belong to one group ({groups[0].name})"
        raise ResultsError(f"{only}: nothing to compare; name them apart with A=PATH B=PATH")
    return groups


def several_students(groups: Sequence[Group]) -> list[str]:
    """That a method was trained on several students or lineages, each of which is compared by itself."""
    found = []
    for name in dict.fromkeys(group.name for group in groups):
        firsts = [group.members[0].every_setting for group in groups if group.name == name]
        key = next((key for key in SHARED if len({str(one.get(key)) for one in firsts}) == len(firsts) > 1), None)
        if key is not None:
            found.append(
                f"{name} has runs with {len(firsts)} students, each compared by itself; to compare over them, --unit {key}"
            )
    return found


def _changed(first: ModelResults, second: ModelResults) -> list[str]:
    """Training settings in which two members of a group differ; of untrained students only the models count."""
    names = [*first.recipe, *(name for name in second.recipe if name not in first.recipe)]
    untrained = first.step == 0 and second.step == 0
    changed = [name for name in names if first.recipe.get(name) != second.recipe.get(name)]
    changed = [name for name in changed if name.startswith("models.") or not untrained]
    steps = [] if first.step == second.step else [f"step ({first.step} and {second.step})"]
    return (changed if first.recipe and second.recipe else []) + steps


def baselines(groups: Sequence[Group], baseline: str | None, notes: list[str]) -> dict[int, int]:
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


def pair_seeds(base: Group, group: Group, notes: list[str]) -> list[tuple[int, int]]:
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
        why = f"{group.name} and {base.name} have no training seed in common, or none is recorded"
        notes.append(f"Not matched: {why}; paired in the order given{which}")
    return [(place, place) for place in range(count)]


def pair_in_units(base: Group, group: Group, notes: list[str]) -> list[tuple[int, int]]:
    """The same unit by unit: the members of every unit that both have."""
    pairs: list[tuple[int, int]] = []
    common = [unit for unit in dict.fromkeys(base.units) if unit in group.units]
    for unit in common:
        ours, theirs = ([place for place, one in enumerate(side.units) if one == unit] for side in (group, base))
        baseline, compared = (
            Group(f"{side.name} in {unit}", None, tuple(side.members[place] for place in places))
            for side, places in ((base, theirs), (group, ours))
        )
        pairs += [(theirs[one], ours[two]) for one, two in pair_seeds(baseline, compared, notes)]
    alone = [unit for unit in dict.fromkeys((*base.units, *group.units)) if unit not in common]
    if alone:
        notes.append(f"{group.name} and {base.name} are compared on the units that both have; left out: {_listed(alone)}")
    if not common:
        raise ResultsError(f"{group.name} and {base.name} have no unit in common: {_listed(alone)}")
    return pairs


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


# --- what is compared ------------------------------------------------------------------------------------------------


def choose_tasks(groups: Sequence[Group], wanted: Sequence[str] | None) -> list[str]:
    present = list(dict.fromkeys(task for group in groups for member in group.members for task in member.tasks))
    for task in wanted or ():
        if task not in present:
            raise ResultsError(f"no result has the task {task!r}; there are: {', '.join(present)}")
    return list(dict.fromkeys(wanted)) if wanted else present


def align(task: str, groups: Sequence[Group], metric: Metric, notes: list[str]) -> dict[int, Side]:
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
        shared = f"ONLY the {len(ids)} that all have are compared, of up to {most}"
        notes.append(f"{task}: the results have different problems. {shared}")
    counts = sorted({result.scores.shape[1] for result in every})
    if len(counts) > 1:
        notes.append(f"{task}: not matched, since samples per problem differ ({_listed(counts)})")
    sides = {}
    for place, having in members.items():
        values, samples = [], []
        for member, data in having:
            where = {problem: row for row, problem in enumerate(data.result.problem_ids)}
            rows = torch.tensor([where[problem] for problem in ids])
            values.append(metric.values(data, str(member.path))[rows])
            samples.append(data.result.scores[rows])
        sides[place] = Side(torch.stack(values), samples)
    return sides


def note_settings(base: Group, group: Group, pairs: Sequence[tuple[int, int]], notes: list[str]) -> None:
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

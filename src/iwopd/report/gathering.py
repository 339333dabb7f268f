"""Runs that differ in nothing but the seed are one group: one label, one colour and one line style in every chart.

Probes have labels and styles of their own, as a probe is of a pair of models, not of a method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iwopd.analysis.probe.result import Probe
from iwopd.methods import TITLES, method_title
from iwopd.runs.identity import method_settings
from iwopd.runs.logs import Notes
from iwopd.runs.reading import Run

COMPARED_PROBES = 4
"""So many pairs stay readable as colours in one chart; more of them get a section each."""

FIXED_STYLES = {"OPD": 0, "IW-OPD": 1}
"""The two that nearly every report has look the same in all of them."""


@dataclass(frozen=True)
class Group:
    """The runs of one method, one per seed."""

    label: str
    style: int
    """Index into the palette."""
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class TaskCurve:
    """One group on one task, at every step that all of its runs evaluated."""

    group: Group
    problem_ids: tuple[str, ...]
    """N ids, the same for all runs and steps."""
    by_seed: dict[int, dict[int | None, Tensor]]
    """Step, then seed: scores [N, K]."""

    @property
    def steps(self) -> list[int]:
        return list(self.by_seed)

    def scores(self, step: int) -> Tensor:
        """[N, seeds x K]."""
        return torch.cat(list(self.by_seed[step].values()), 1)


@dataclass(frozen=True, eq=False)
class ProbeView:
    """A probe with what it is called and looks like on the page."""

    label: str
    style: int
    name: str
    """Of its file or folder."""
    probe: Probe
    alone: bool = True
    """The only one in its charts: then colours need not stand for probes."""

    @property
    def pair(self) -> str:
        """Student and teacher."""
        return f"{_model(self.probe.student)} from {_model(self.probe.teacher)}"


@dataclass(frozen=True)
class ReportData:
    """Everything that the panels read."""

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    tasks: dict[str, tuple[TaskCurve, ...]]
    notes: Notes
    handoff: dict[str, Any] | None
    max_tokens: int
    """Most response tokens in the token view."""
    probes: tuple[ProbeView, ...] = ()

    @property
    def compared(self) -> tuple[ProbeView, ...]:
        """Probes that share charts; none if there are so many that each has its own section."""
        return self.probes if len(self.probes) <= COMPARED_PROBES else ()


def gather(
    runs: Sequence[Run], notes: Notes, handoff: dict[str, Any] | None, max_tokens: int, probes: Sequence[tuple[str, Probe]] = ()
) -> ReportData:
    groups = _groups(runs)
    _note_differences(runs, notes)
    return ReportData(tuple(runs), groups, _tasks(groups, notes), notes, handoff, max_tokens, probe_views(probes))


def probe_views(probes: Sequence[tuple[str, Probe]]) -> tuple[ProbeView, ...]:
    """Labelled by what tells them apart: the student; else the pair, the task, and at last the folder."""
    views = [ProbeView(_model(probe.student), n, name, probe, len(probes) == 1) for n, (name, probe) in enumerate(probes)]
    candidates = [
        [view.label for view in views],
        [view.pair for view in views],
        [f"{view.pair}, {view.probe.task}" for view in views],
        [f"{view.label} ({view.name})" for view in views],
    ]
    labels = next((names for names in candidates if len(set(names)) == len(names)), candidates[-1])
    return tuple(replace(view, label=label) for view, label in zip(views, labels, strict=True))


def folder_handoff(paths: Sequence[Path]) -> Path | None:
    """`handoff.json` beside the runs, or in the folder that was given."""
    files = (folder / "handoff.json" for path in paths for folder in (path, path.parent))
    return next((file for file in files if file.is_file()), None)


def last_part(name: str) -> str:
    """Of a path or a hub id."""
    return name.rstrip("/").rpartition("/")[2] or name


def _model(name: str) -> str:
    """A hub id as it is, of a path its last part."""
    return last_part(name) if name.startswith(("/", ".", "~")) else name


# --- groups -----------------------------------------------------------------------------------------------------------


def _groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    members: dict[tuple[str, Any], list[Run]] = {}
    for run in runs:
        method = run.setting("method", dict)
        label = run.name if method is None else method_title(method)
        alone = run.name if not run.config else None  # without settings nobody knows what it belongs to
        members.setdefault((label, alone or _identity(run)), []).append(run)
    split: list[tuple[str, list[Run]]] = []
    for (label, _), those in members.items():
        rounds: dict[int, list[Run]] = {}
        for place, run in enumerate(those):  # the same seed twice is not a second seed
            turn = sum(earlier.seed == run.seed for earlier in those[:place])
            rounds.setdefault(turn, []).append(run)
        split += [(label, group) for group in rounds.values()]
    labels = _distinct(split)
    order = {title: place for place, title in enumerate(TITLES.values())}
    ranked = sorted(range(len(split)), key=lambda i: (order.get(split[i][0], len(order)), i))
    taken = {FIXED_STYLES[labels[i]] for i in ranked if labels[i] in FIXED_STYLES}
    free = iter(style for style in range(len(split) + len(FIXED_STYLES)) if style not in taken)
    styles = [FIXED_STYLES[labels[i]] if labels[i] in FIXED_STYLES else next(free) for i in ranked]
    return tuple(Group(labels[i], style, tuple(split[i][1])) for i, style in zip(ranked, styles, strict=True))


def _identity(run: Run) -> tuple[Any, ...]:
    """The settings that make a run comparable, as something hashable."""
    return tuple(sorted((name, str(value)) for name, value in method_settings(run.config).items()))


def _distinct(split: Sequence[tuple[str, list[Run]]]) -> list[str]:
    """Labels, told apart by the settings in which groups of the same method differ, or else by their runs' names."""
    labels = []
    for label, runs in split:
        same = [other for other in split if other[0] == label]
        if len(same) > 1:
            identities = [dict(_identity(other[0])) for _, other in same]
            mine = dict(_identity(runs[0]))
            differing = [name for name in mine if any(other.get(name) != mine[name] for other in identities)][:2]
            texts = [", ".join(f"{name} {other.get(name)}" for name in differing) for other in (mine, *identities)]
            label = f"{label} ({texts[0] if differing and texts[1:].count(texts[0]) == 1 else runs[0].name})"
        labels.append(label)
    return labels


# --- tasks ------------------------------------------------------------------------------------------------------------


def _tasks(groups: Sequence[Group], notes: Notes) -> dict[str, tuple[TaskCurve, ...]]:
    names = list(dict.fromkeys(result.task for group in groups for run in group.runs for result in run.evals))
    tasks = {}
    for name in names:
        curves = [curve for group in groups if (curve := _curve(group, name, notes)) is not None]
        if curves:
            tasks[name] = tuple(curves)
        absent = [run.name for group in groups for run in group.runs if all(one.task != name for one in run.evals)]
        if absent and len(names) > 1:
            who = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
            notes.add(who, f"not evaluated on the task {name!r}: not compared with the runs that were")
        if len({curve.problem_ids for curve in curves}) > 1:
            notes.add(name, "the runs were evaluated on different problems: differences between them are not paired")
    return tasks


def _curve(group: Group, task: str, notes: Notes) -> TaskCurve | None:
    ids: tuple[str, ...] | None = None
    by_seed: dict[int | None, dict[int, Tensor]] = {}
    for run in group.runs:
        results = [one for one in run.evals if one.task == task]
        if not results:
            continue
        ids = results[0].problem_ids if ids is None else ids
        fitting = {one.step: one.scores for one in results if one.problem_ids == ids and one.step is not None}
        if len(fitting) < len(results):
            notes.add(run.name, f"{len(results) - len(fitting)} evaluations on {task!r} are of other problems and are left out")
        if fitting:
            by_seed[run.seed] = fitting
    if ids is None or not by_seed:
        return None
    everywhere = set.intersection(*(set(steps) for steps in by_seed.values()))
    if any(set(steps) != everywhere for steps in by_seed.values()):
        notes.add(group.label, "its seeds were not evaluated at the same steps; the curve has the steps that all share")
    scores = {step: {seed: steps[step] for seed, steps in by_seed.items()} for step in sorted(everywhere)}
    return TaskCurve(group, ids, scores) if scores else None


def _note_differences(runs: Sequence[Run], notes: Notes) -> None:
    """Say so where runs on one page are not of one experiment."""
    settings = {"embedded worlds": "models.world", "students": "models.student", "teachers": "models.teacher"}
    for what in (*settings, "training prompts"):
        values = {run.name: run.setting(settings[what], str) if what in settings else run.about.get("data") for run in runs}
        known = {name: str(value) for name, value in values.items() if value is not None}
        if len(set(known.values())) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in known.items())
            notes.add("comparison", f"the runs have different {what}, so a difference may not be the method's ({listed})")

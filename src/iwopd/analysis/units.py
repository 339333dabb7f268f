"""Units of a comparison: runs that share their models (a lineage, a student) are one unit, however many seeds they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from iwopd.runs.evaluations import ResultsError
from iwopd.runs.results import ModelResults

SHARED = ("models.lineage", "models.student", "models.teacher", "models.student_size", "models.teacher_size")
"""Settings that name what runs may share, in the order in which they are proposed as units."""
LEAST_SCORES = 20
"""Samples that must agree before equal evaluations look like copies of one run."""


@dataclass(frozen=True)
class Units:
    """How a result's unit is found: by name for its folder, else by the value of a setting."""

    setting: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    """By folder, as it was given."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Units | None:
        """Of the words of `--unit`: a dotted setting, or PATH=UNIT for results that do not say it; None without words."""
        settings = [word for word in words if "=" not in word]
        if len(settings) > 1:
            raise ResultsError(f"--unit takes one setting, got {' and '.join(settings)}; name results with --unit PATH=UNIT")
        named = {}
        for word in words:
            path, equals, unit = word.rpartition("=")
            if equals and not (path and unit):
                raise ResultsError(f"--unit {word!r} is not PATH=UNIT")
            if equals:
                named[path.rstrip("/")] = unit
        return cls(settings[0] if settings else None, named) if words else None

    def of(self, result: ModelResults) -> str:
        """The unit of a result."""
        if (name := self.named.get(str(result.path))) is not None:
            return name
        value = result.every_setting.get(self.setting) if self.setting else None
        if value is None:
            what = f"has no setting {self.setting}" if self.setting else "has no unit"
            raise ResultsError(f"{result.path} {what}: name its unit with --unit {result.path}=UNIT")
        return str(value)

    def check(self, results: Sequence[ModelResults]) -> None:
        """Every name must be of a result."""
        paths = {str(result.path) for result in results}
        for path in self.named:
            if path not in paths:
                raise ResultsError(f"--unit names {path}, which is not among the results: {', '.join(sorted(paths))}")

    @property
    def title(self) -> str:
        return self.setting or "units"


def warnings(name: str, members: Sequence[ModelResults]) -> list[str]:
    """What the runs of one method share and should not."""
    found = [f"{one.path} and {two.path} of {name} {why}" for one, two, why in _copies(members)]
    for key in SHARED:
        values = [one.every_setting.get(key) for one in members]
        if None in values or len(set(map(str, values))) in (1, len(members)):
            continue  # unknown, all the same, or all different
        what = "lineages" if key == "models.lineage" else f"values of {key}"
        found.append(
            f"{name}: {len(members)} runs of {len(set(map(str, values)))} {what}: runs that share models are not independent; "
            f"use --unit {key}"
        )
        break
    found += [
        f"{one.path}: {task} is evaluated on the training prompts ({file})"
        for one in members
        for task, file in _trained_on(one)
    ]
    return found


def _copies(members: Sequence[ModelResults]) -> list[tuple[ModelResults, ModelResults, str]]:
    """Pairs whose every sample has the same score, though not all scores are equal."""
    pairs = []
    for place, one in enumerate(members):
        for two in members[:place]:
            if one.step == 0 and two.step == 0:
                continue  # untrained students are the same
            if one.tasks.keys() == two.tasks.keys() and all(_equal(one, two, task) for task in one.tasks):
                pairs.append((two, one, "have the same score on every sample: copies of one run count as one, leave one out"))
    return pairs


def _equal(one: ModelResults, two: ModelResults, task: str) -> bool:
    a, b = one.tasks[task].result, two.tasks[task].result
    if a.problem_ids != b.problem_ids or a.scores.shape != b.scores.shape or a.scores.numel() < LEAST_SCORES:
        return False
    return bool((a.scores == b.scores).all()) and bool((a.scores != a.scores[0, 0]).any())


def _trained_on(result: ModelResults) -> list[tuple[str, str]]:
    """Tasks whose data file is the file of training prompts."""
    prompts, files = result.every_setting.get("data.prompts"), result.every_setting.get("eval.data")
    known = files if isinstance(files, Mapping) else {}
    nested = {
        name.removeprefix("eval.data."): value for name, value in result.every_setting.items() if name.startswith("eval.data.")
    }
    return [(task, file) for task, file in {**nested, **known}.items() if prompts and file == prompts]

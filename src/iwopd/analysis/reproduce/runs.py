"""The runs behind the tables: lineages x seeds of every variant, found by the hash of their settings.

Lineages are the units of every interval; see `effects`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import iwopd
from iwopd.analysis.gradient_noise import GradientNoise
from iwopd.analysis.reproduce.effects import ByLineage, Effect, Families, effect_of, mean_of
from iwopd.analysis.reproduce.records import Record, Records, record_of
from iwopd.analysis.reproduce.variants import Variant
from iwopd.config import Config, make_config
from iwopd.eval.statistics import Interval
from iwopd.runs.identity import run_key
from iwopd.train.many import PlannedRun


@dataclass(frozen=True)
class Runs:
    """Where the runs are and what they share. Runs of equal lineage and seed have equal prompts and sampling noise."""

    root: Path
    world: str = "clean"
    lineages: Sequence[int] = (0, 1)
    seeds: Sequence[int] = (0, 1, 2)
    steps: int = 40
    lr: float = 1e-4
    prompts_per_step: int = 64
    problems: int = 1000
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings, by section."""
    records: Mapping[str, Record] = field(default_factory=dict)
    """Of runs that need no folder, by key."""
    results: Path | None = None
    """Folder of further records: gradient noise, teachers by themselves."""
    read_only: bool = False
    """Whether nothing may be measured that is not recorded."""
    families: Families | None = None
    """Comparisons that are corrected for each other; none: each is alone."""
    found: dict[str, Record] = field(default_factory=dict, repr=False, compare=False)
    """Records that were looked up, by all that names a run: copies with other steps or seeds share them."""
    plans: dict[str, PlannedRun] = field(default_factory=dict, repr=False, compare=False)
    """Likewise: settings take a while to validate."""

    @property
    def members(self) -> list[tuple[int, int]]:
        """Every (lineage, seed)."""
        return [(lineage, seed) for lineage in self.lineages for seed in self.seeds]

    def config(self, variant: Variant, lineage: int, seed: int) -> Config:
        settings: dict[str, Any] = {
            "seed": seed,
            "steps": self.steps,
            "threads": 1,
            "models": {"world": self.world, "lineage": lineage, **variant.models},
            "rollout": {"prompts_per_step": self.prompts_per_step, **variant.rollout},
            "optim": {"lr": self.lr * variant.lr_factor, **variant.optim},
            "eval": {"every": 10, "prompts": self.problems},
            "checkpoint": {"every": self.steps, "keep": 1},
            "method": dict(variant.method),
            "tracking": {"console": "off"},
        }
        for section, values in self.more.items():
            settings[section] = {**settings.get(section, {}), **values}
        return make_config(settings)

    def planned(self, variant: Variant, lineage: int, seed: int) -> PlannedRun:
        name = self._name(variant, lineage, seed)
        if name not in self.plans:
            config = self.config(variant, lineage, seed)
            title = f"{variant.title}, lineage {lineage}, seed {seed}"
            self.plans[name] = PlannedRun(title, self.root / run_key(config), config)
        return self.plans[name]

    def all_planned(self, variants: Iterable[Variant]) -> list[PlannedRun]:
        """All runs of these variants, each once; an interrupted sweep has some seeds of every method."""
        found: dict[Path, PlannedRun] = {}
        for lineage, seed in self.members:
            for run in (self.planned(variant, lineage, seed) for variant in variants):
                found.setdefault(run.folder, run)
        return list(found.values())

    def record(self, variant: Variant, lineage: int, seed: int) -> Record | None:
        """What is known of a run: from the records, else from its folder if it is finished there."""
        name = self._name(variant, lineage, seed)
        if name not in self.found:
            run = self.planned(variant, lineage, seed)
            record = self.records.get(run.folder.name)
            if record is None and run.finished:
                record = record_of(run.folder, variant.title)
            if record is None:
                return None
            self.found[name] = record
        return self.found[name]

    def missing(self, variants: Iterable[Variant]) -> list[str]:
        """Variants of which not every run is there, with those that are missing, in words."""
        listed = []
        for variant in {repr(one): one for one in variants}.values():
            gone = [member for member in self.members if self.record(variant, *member) is None]
            if gone:
                which = "" if len(gone) == len(self.members) else f" ({', '.join(f'lineage {x} seed {y}' for x, y in gone)})"
                listed.append(f"{variant.title}{which}")
        return listed

    def by_lineage(self, variant: Variant, step: int) -> dict[int, float]:
        """Accuracy in percent, seeds averaged, of the lineages that there are."""
        return _means({lineage: list(seeds.values()) for lineage, seeds in self._accuracies(variant, step).items()})

    def accuracy(self, variant: Variant, step: int) -> Interval:
        """In percent, over lineages; bounds are NaN with too few of them, all is NaN if nothing was run."""
        return mean_of(self.by_lineage(variant, step))

    def difference(self, variant: Variant, baseline: Variant, step: int, of: Runs | None = None) -> dict[int, float]:
        """In points by lineage, over the lineages and seeds that both have. `of`: the baseline's runs, if they are others."""
        ours, theirs = self._accuracies(variant, step), (of or self)._accuracies(baseline, step)
        return _means(
            {
                lineage: [ours[lineage][seed] - found[seed] for seed in found if seed in ours[lineage]]
                for lineage, found in theirs.items()
                if lineage in ours
            }
        )

    def effect(self, variant: Variant, baseline: Variant, step: int, of: Runs | None = None, family: str = "") -> Effect:
        """Of `difference`; corrected with all others of the item, or of a family of its own within it."""
        return self.judged(f"{variant!r} - {baseline!r}, {step}", self.difference(variant, baseline, step, of), family)

    def judged(self, comparison: str, differences: ByLineage, family: str = "") -> Effect:
        """Of any differences by lineage; `comparison` names it within its family."""
        return effect_of(differences, comparison, self.families, family)

    def best(self, variants: Iterable[Variant], step: int) -> Variant:
        """The one with the highest accuracy, of those that were run."""
        return max(variants, key=lambda one: _or_least(self.accuracy(one, step).mean))

    def kl(self, variant: Variant) -> Tensor:
        """[S, steps]: mean of lp_0 - lp_T over a step's tokens, for each run that there is."""
        rows = [[math.nan if one is None else one for one in record["kl"]] for record in self._all(variant)]
        return torch.tensor(rows, dtype=torch.float64)

    def agreement(self, variant: Variant) -> dict[int, Interval]:
        """Of the gradients before and after drifts (`algo.agreement`), by step, over lineages; without steps that lack it."""
        found: dict[int, dict[int, list[float]]] = {}
        for one in self._all(variant):
            for step, value in enumerate(one.get("agreement", ()), start=1):
                if value is not None:
                    found.setdefault(step, {}).setdefault(one["lineage"], []).append(value)
        return {step: mean_of(_means(values), (-1.0, 1.0)) for step, values in found.items()}

    def tokens(self, variant: Variant, step: int) -> dict[tuple[int, int], float]:
        """Tokens written up to this step, by lineage and seed."""
        made = [one for one in self._all(variant) if str(step) in one["tokens"]]
        return {(one["lineage"], one["seed"]): float(one["tokens"][str(step)]) for one in made}

    def noise_file(self, lineage: int) -> Path:
        """Where the gradient noise of a lineage's untrained student is kept."""
        return self.root / f"noise-{self.world}-{lineage}-{self.prompts_per_step}.json"

    def noises(self, variants: Sequence[Variant]) -> dict[int, dict[str, GradientNoise]]:
        """Gradient noise by lineage and title, as far as it was measured."""
        kept = {lineage: self.noises_of(lineage) for lineage in self.lineages}
        known = {
            lineage: {one.title: found[one.title] for one in variants if one.title in found} for lineage, found in kept.items()
        }
        return {lineage: found for lineage, found in known.items() if len(found) == len(variants)}

    def noises_of(self, lineage: int) -> dict[str, GradientNoise]:
        """By title: from the records, and from what is kept beside the runs."""
        path = self.noise_file(lineage)
        beside = json.loads(path.read_text()) if path.exists() else {}
        recorded = self.noise_records.read().values() if self.noise_records else ()
        place = (self.world, lineage, self.prompts_per_step)
        found = {
            one["title"]: one["noise"] for one in recorded if (one["world"], one["lineage"], one["prompts_per_step"]) == place
        }
        return {title: GradientNoise(*values) for title, values in {**beside, **found}.items()}

    @property
    def noise_records(self) -> Records | None:
        return Records(self.results / "noise.jsonl") if self.results else None

    def noise_record(self, lineage: int, title: str, noise: GradientNoise) -> Record:
        key = f"{self.world}-{lineage}-{self.prompts_per_step}-{title}"
        place = {"world": self.world, "lineage": lineage, "prompts_per_step": self.prompts_per_step, "title": title}
        return {"key": key, **place, "noise": list(noise), "iwopd": iwopd.__version__}

    def _name(self, variant: Variant, lineage: int, seed: int) -> str:
        same = (self.root, self.world, self.steps, self.lr, self.prompts_per_step, self.problems, self.more)
        return repr((same, variant, lineage, seed))

    def _all(self, variant: Variant) -> list[Record]:
        return [one for member in self.members if (one := self.record(variant, *member)) is not None]

    def _accuracies(self, variant: Variant, step: int) -> dict[int, dict[int, float]]:
        """By lineage and seed."""
        found: dict[int, dict[int, float]] = {}
        for one in self._all(variant):
            if str(step) in one["accuracy"]:
                found.setdefault(one["lineage"], {})[one["seed"]] = one["accuracy"][str(step)]
        return found


def _means(values: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {lineage: sum(found) / len(found) for lineage, found in values.items() if found}


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value

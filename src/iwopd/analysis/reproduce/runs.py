"""The runs behind the tables: lineages x seeds of every variant, found by the hash of their settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iwopd.analysis.gradient_noise import GradientNoise
from iwopd.analysis.reproduce.variants import Variant
from iwopd.config import Config, make_config
from iwopd.eval.statistics import Interval, crossed, interval_over_problems, sign_flip_p
from iwopd.runs.identity import run_key
from iwopd.runs.reading import Run
from iwopd.train.many import PlannedRun


@dataclass(frozen=True)
class Effect:
    """A difference in points, with its 95 % interval over runs and problems, and its p-value."""

    interval: Interval
    p_value: float
    runs: int


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
            "optim": {"lr": self.lr * variant.lr_factor},
            "eval": {"every": 10, "prompts": self.problems},
            "checkpoint": {"every": self.steps, "keep": 1},
            "method": dict(variant.method),
            "tracking": {"console": "off"},
        }
        for section, values in self.more.items():
            settings[section] = {**settings.get(section, {}), **values}
        return make_config(settings)

    def planned(self, variant: Variant, lineage: int, seed: int) -> PlannedRun:
        config = self.config(variant, lineage, seed)
        return PlannedRun(f"{variant.title}, lineage {lineage}, seed {seed}", self.root / run_key(config), config)

    def all_planned(self, variants: Iterable[Variant]) -> list[PlannedRun]:
        """All runs of these variants, each once; an interrupted sweep has some seeds of every method."""
        found: dict[Path, PlannedRun] = {}
        for lineage, seed in self.members:
            for run in (self.planned(variant, lineage, seed) for variant in variants):
                found.setdefault(run.folder, run)
        return list(found.values())

    def scores(self, variant: Variant, step: int) -> Tensor:
        """[S, N]: share of right samples of each problem, for each run (lineage by lineage, seed by seed)."""
        return torch.stack([next(one.scores.mean(1) for one in run.evals if one.step == step) for run in self._made(variant)])

    def accuracy(self, variant: Variant, step: int) -> Interval:
        """In percent."""
        return _interval(self.scores(variant, step), (0.0, 1.0)).times(100.0)

    def effect(self, variant: Variant, baseline: Variant, step: int) -> Effect:
        """Paired by lineage, seed and problem, in points."""
        difference = self.scores(variant, step) - self.scores(baseline, step)
        both = crossed([difference])
        p_value = sign_flip_p([difference.mean(0)]) if both is None else both.p_value
        return Effect(_interval(difference, (-1.0, 1.0)).times(100.0), p_value, len(difference))

    def metrics(self, variant: Variant, name: str) -> Tensor:
        """[S, steps] of a metric."""
        rows = [[record[name] for record in run.metrics] for run in self._made(variant)]
        return torch.tensor(rows, dtype=torch.float64)

    def noise_file(self, lineage: int) -> Path:
        """Where the gradient noise of a lineage's untrained student is kept."""
        return self.root / f"noise-{self.world}-{lineage}-{self.prompts_per_step}.json"

    def noises(self, variants: Sequence[Variant]) -> dict[int, dict[str, GradientNoise]]:
        """Gradient noise by lineage and title."""
        kept = {lineage: json.loads(self.noise_file(lineage).read_text()) for lineage in self.lineages}
        return {lineage: {one.title: GradientNoise(*found[one.title]) for one in variants} for lineage, found in kept.items()}

    def _made(self, variant: Variant) -> list[Run]:
        return [Run(self.planned(variant, lineage, seed).folder) for lineage, seed in self.members]


def _interval(values: Tensor, bounds: tuple[float, float]) -> Interval:
    both = crossed([values])  # None with one run
    return both.interval(bounds=bounds) if both is not None else interval_over_problems([values.mean(0)], bounds=bounds)

"""Differences over lineages, and the families in which they are corrected for each other.

A lineage (a teacher and a student pretrained together) is the unit: its seeds share its models, so they are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from iwopd.eval.statistics import ALPHA, LEAST_UNITS, Interval, holm, over_units

ByLineage = Mapping[int, float]
"""Means over seeds."""


@dataclass(frozen=True)
class Effect:
    """A difference in points: its mean, its single t interval over lineages, and Holm's p of the same t."""

    interval: Interval
    """NaN bounds below `LEAST_UNITS` lineages, a NaN mean without any."""
    p_value: float
    """Of this comparison alone."""
    units: int
    holm: float
    """Corrected for all comparisons of its family."""
    comparisons: int
    """In the family."""

    @property
    def enough(self) -> bool:
        """Whether there are lineages enough for a verdict."""
        return self.units >= LEAST_UNITS

    @property
    def alone(self) -> bool:
        """Whether the single interval leaves zero out."""
        return self.enough and self.p_value < ALPHA

    @property
    def established(self) -> bool:
        return self.enough and self.holm < ALPHA


@dataclass
class Families:
    """Comparisons by family. A first reading of an item asks for them all, a second one is told Holm's p-values."""

    asked: dict[str, dict[str, float]] = field(default_factory=dict)
    corrected: dict[str, dict[str, float]] = field(default_factory=dict)

    def correct(self) -> None:
        """From now on, answer with Holm's correction over all that was asked."""
        for name, family in self.asked.items():
            self.corrected[name] = dict(zip(family, holm(list(family.values())), strict=True))

    def p_value(self, family: str, comparison: str, p_value: float) -> tuple[float, int]:
        """Holm's p and the size of the family, once that is known."""
        self.asked.setdefault(family, {})[comparison] = p_value
        found = self.corrected.get(family, {})
        return (found[comparison], len(found)) if comparison in found else (p_value, 1)


def effect_of(differences: ByLineage, comparison: str, families: Families | None = None, family: str = "") -> Effect:
    """Of differences by lineage. Too few lineages give a mean, no interval, and no place in the family."""
    if not differences:
        return Effect(Interval(math.nan, math.nan, math.nan), 1.0, 0, 1.0, 1)
    found = over_units(list(differences.values()))
    if not found.enough:
        return Effect(Interval(found.interval.mean, math.nan, math.nan), 1.0, found.units, 1.0, 1)
    corrected, size = families.p_value(family, comparison, found.p_value) if families else (found.p_value, 1)
    return Effect(found.interval, found.p_value, found.units, corrected, size)


def mean_of(values: ByLineage, bounds: tuple[float, float] = (0.0, 100.0)) -> Interval:
    """A mean over lineages with its t interval within bounds; NaN where there is none."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    found = over_units(list(values.values()))
    if not found.enough:
        return Interval(found.interval.mean, math.nan, math.nan)
    return Interval(found.interval.mean, max(bounds[0], found.interval.low), min(bounds[1], found.interval.high))


def minus(one: ByLineage, other: ByLineage) -> dict[int, float]:
    """On the lineages that both have."""
    return {lineage: one[lineage] - other[lineage] for lineage in one if lineage in other}

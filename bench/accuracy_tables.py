"""Arithmetic and tables of time_to_accuracy.py: when a curve arrives at an accuracy, and how much longer TRL takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.9
REFERENCE = "opd/full"
Points = list[dict[str, float]]
"""Evaluations of a run in the order of steps: `step`, `accuracy`, and what it took until then: `cpu`, `wall`, `tokens`."""
Curves = dict[tuple[str, int, str, float], Points]
"""By world, lineage, arm and learning rate (as a multiple of the world's)."""


def arrival(points: Points, target: float, clock: str = "cpu") -> float | None:
    """Seconds at which the accuracy first reaches the target, linear between evaluations; None: never."""
    for place, point in enumerate(points):
        if point["accuracy"] >= target:
            if place == 0:
                return 0.0
            before = points[place - 1]
            share = (target - before["accuracy"]) / (point["accuracy"] - before["accuracy"])
            return before[clock] + share * (point[clock] - before[clock])
    return None


def final(points: Points) -> float:
    """Accuracy at the last step."""
    return points[-1]["accuracy"]


@dataclass(frozen=True)
class Ratio:
    """How many times our seconds TRL needs; `bound`: at least so many, since it did not arrive."""

    value: float
    bound: bool = False

    def __str__(self) -> str:
        return f"{'> ' if self.bound else ''}{self.value:.1f}"


def ratio(theirs: float | None, their_end: float, ours: float | None) -> Ratio | None:
    """None: we did not arrive, or the untrained student was there already."""
    if not ours:
        return None
    return Ratio(their_end / ours, bound=True) if theirs is None else Ratio(theirs / ours)


def overall(ratios: Sequence[Ratio]) -> Ratio:
    """Geometric mean; one bound makes it a bound."""
    mean = math.exp(sum(math.log(one.value) for one in ratios) / len(ratios))
    return Ratio(mean, any(one.bound for one in ratios))


def best_rate(times: dict[float, list[float | None]]) -> float:
    """The learning rate at which most lineages arrive, then soonest."""

    def order(rate: float) -> tuple[int, float]:
        there = [max(one, 1e-9) for one in times[rate] if one is not None]
        return -len(there), math.exp(sum(map(math.log, there)) / len(there)) if there else math.inf

    return min(times, key=order)


def targets(curves: Curves, world: str, lineage: int, steps: int) -> dict[str, float]:
    """Accuracies to reach, by name: those for which OPD has been run to the end, at the world's own rate or at any."""
    whole = {key[3]: of for key, of in curves.items() if key[:3] == (world, lineage, REFERENCE) and of[-1]["step"] == steps}
    ends = {rate: final(points) for rate, points in whole.items()}
    found = {"best": SHARE * max(ends.values())} if ends else {}
    return {"default": SHARE * ends[1.0], **found} if 1.0 in ends else found


@dataclass(frozen=True)
class Row:
    """An arm of a world at its best rate, against one target."""

    arm: str
    rate: float
    seconds: list[float | None]
    """By lineage."""
    steps: list[float | None]
    ratios: list[Ratio]
    """TRL's seconds over these, of the lineages where there is a ratio."""


def arm_rows(curves: Curves, world: str, lineages: Sequence[int], goals: dict[int, float]) -> list[Row]:
    """All arms that were run in all these lineages, each at its best rate."""
    chosen: dict[str, tuple[float, list[Points]]] = {}
    for arm in dict.fromkeys(key[2] for key in curves if key[0] == world):
        by_rate = {}
        for rate in sorted({key[3] for key in curves if key[:1] == (world,) and key[2] == arm}):
            found = [curves.get((world, lineage, arm, rate)) for lineage in lineages]
            if all(found):
                by_rate[rate] = [one for one in found if one]
        if by_rate:
            times = {
                rate: [arrival(one, goals[at]) for at, one in zip(lineages, found, strict=True)]
                for rate, found in by_rate.items()
            }
            best = best_rate(times)
            chosen[arm] = best, by_rate[best]
    return [
        _row(arm, rate, found, chosen.get("trl"), [goals[one] for one in lineages]) for arm, (rate, found) in chosen.items()
    ]


def _row(arm: str, rate: float, found: list[Points], trl: tuple[float, list[Points]] | None, goals: list[float]) -> Row:
    seconds, steps = ([arrival(one, goal, clock) for one, goal in zip(found, goals, strict=True)] for clock in ("cpu", "step"))
    ratios = [
        ratio(arrival(theirs, goal), theirs[-1]["cpu"], ours)
        for theirs, ours, goal in zip(trl[1] if trl else [], seconds, goals if trl else [], strict=False)
    ]
    return Row(arm, rate, seconds, steps, [one for one in ratios if one])


def table(rows: Sequence[Row], lineages: Sequence[int]) -> list[str]:
    """CPU seconds and, in brackets, steps until the target; TRL's seconds over them."""
    heads = ["arm", "lr x", *(f"lineage {one}" for one in lineages), "TRL / arm (range)"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for row in rows:
        cells = ["never" if s is None else f"{s:.1f} ({n:.0f})" for s, n in zip(row.seconds, row.steps, strict=True)]
        lines.append("| " + " | ".join([row.arm, f"{row.rate:g}", *cells, spread(row.ratios, len(lineages))]) + " |")
    return lines


def spread(ratios: Sequence[Ratio], lineages: int) -> str:
    """Geometric mean and range; says if lineages are missing."""
    if not ratios:
        return "–"
    low, high = (choose(ratios, key=lambda one: one.value) for choose in (min, max))
    missing = f"; {len(ratios)} of {lineages}" if len(ratios) < lineages else ""
    return f"{overall(ratios)} ({low} to {high}{missing})"

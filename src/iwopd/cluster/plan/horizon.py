"""A horizon's price: the lengths of answers that stop earlier, from a probe where it takes one.

`fixed` and `growing` are limits, known before anything is run. Where `drift` and `budget` stop answers, only rollouts and a
teacher can say: a probe's (`iwopd probe`). Without one they are priced as full, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from iwopd.cluster.plan.workload import Workload
from iwopd.rollout.horizons import Budget, Drift

TRAINING = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of training at which a growing limit is priced."""


@dataclass(frozen=True)
class CutLengths:
    """What a probe knows of one horizon."""

    section: Mapping[str, Any]
    """As `[rollout.horizon]` has it."""
    quantiles: tuple[float, ...]
    """Of the lengths that it leaves, at even levels from 0 to 1."""


@dataclass(frozen=True)
class Priced:
    """The workload of a step with a horizon; several steps of training where it changes."""

    whole: Workload
    """With answers to their end."""
    steps: tuple[Workload, ...]
    by: Literal["full", "limit", "probe", "unknown"]
    """What the lengths come from; unknown: priced as full."""
    words: str = ""

    @property
    def middle(self) -> Workload:
        """That of the middle of training."""
        return self.steps[len(self.steps) // 2]


def to_the_end(work: Workload) -> Workload:
    """The same recipe without a horizon: nobody follows answers."""
    rollout = work.config.rollout
    plain = rollout.model_copy(update={"horizon": type(rollout.horizon)()})
    return replace(work, config=work.config.model_copy(update={"rollout": plain}), limit=None, asked=None)


def priced(work: Workload, cut: Sequence[CutLengths] = ()) -> Priced:
    """The recipe's horizon, with the lengths that a probe has measured."""
    whole = to_the_end(work)
    horizon, longest = work.config.rollout.horizon.made, work.longest_answer
    if not horizon.stops_online:
        limits = tuple(horizon.limit(longest, progress) for progress in TRAINING)
        if min(limits) >= longest:
            return Priced(whole, (work,), "full")
        if len(set(limits)) == 1:
            return Priced(whole, (replace(work, limit=limits[0]),), "limit", f"answers of at most {limits[0]} tokens")
        steps = tuple(replace(work, limit=limit) for limit in limits)
        words = f"answers of at most {horizon.limit(longest, 0.0)} tokens at first, {horizon.limit(longest, 1.0)} at the end"
        return Priced(whole, steps, "limit", f"{words}; times are means over training")
    if not isinstance(horizon, Drift):
        return Priced(whole, (work,), "unknown", "what this horizon saves is unknown: priced as full")
    found = _nearest(horizon, cut)
    if found is None:
        why = "the probe has no such horizon" if cut else "give a probe of the pair with --probe"
        return Priced(whole, (work,), "unknown", f"what it saves is unknown without the pair's answers: priced as full; {why}")
    threshold = found.section["threshold"]
    words = (
        "lengths from the probe" if threshold == horizon.threshold else f"lengths from the probe, at threshold {threshold:g}"
    )
    shorter = replace(work, quantiles=found.quantiles)
    if isinstance(horizon, Budget):
        samples = work.config.rollout.samples
        prompts = max(1, round(horizon.tokens / (samples * shorter.written)))
        shorter = replace(shorter, asked=prompts * samples)
        words += f"; {horizon.tokens} tokens pay for {prompts} prompts"
    return Priced(whole, (shorter,), "probe", f"{words}; the share that is written grows as the student learns")


def _nearest(horizon: Drift, cut: Sequence[CutLengths]) -> CutLengths | None:
    """With the same rule and block, and the threshold that is nearest in nats."""
    if horizon.weights != "survival" or horizon.params:
        return None
    same = [one for one in cut if one.section.get("type") == "drift" and one.section.get("block") == horizon.block]

    def distance(one: CutLengths) -> float:
        ratio = one.section["threshold"] / horizon.threshold
        return float(max(ratio, 1 / ratio))

    return min(same, key=distance, default=None)

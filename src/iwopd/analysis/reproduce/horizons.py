"""`iwopd reproduce thresholds` and `horizons`: answers that stop at drift against whole ones, and against fewer prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import NOT_RUN, Table, in_words, mean_alone
from iwopd.analysis.reproduce.variants import KL, KL_SURVIVAL, OPD, SURVIVAL, Variant

THRESHOLDS = (0.5, 0.2, 0.05, 0.01)
"""That the search tries."""
LOSS = 3.0
"""Points that a horizon may cost at the last step."""


def stopped(variant: Variant, **settings: Any) -> Variant:
    """The same with a drift horizon."""
    words = "".join(f", {name} {value:g}" for name, value in settings.items())
    return variant.with_rollout(f"{variant.title}, stopped at drift{words}", horizon={"type": "drift", **settings})


def fewer(variant: Variant, prompts: int) -> Variant:
    """The control: whole answers to fewer prompts."""
    return variant.with_rollout(f"{variant.title}, {prompts} prompts", prompts_per_step=prompts)


SEARCHED: Mapping[str, Sequence[tuple[Variant, Sequence[Variant]]]] = {
    world: [
        (sampled, [stopped(sampled, threshold=value) for value in THRESHOLDS]),
        (kl, [stopped(kl, threshold=THRESHOLDS[0]), stopped(kl, threshold=THRESHOLDS[0], block=4)]),
    ]
    for world, sampled, kl in (("clean", OPD, KL), ("drift", SURVIVAL, KL_SURVIVAL))
}
"""Of the search, by world: methods with whole answers, and their variants."""


def share_written(runs: Runs, variant: Variant, whole: Variant, of: Runs | None = None) -> float:
    """Tokens written over all steps of `runs`, as a share of those that whole answers take in the same steps (runs `of`).

    Over the lineages and seeds that both have; NaN if there are none.
    """
    ours, theirs = runs.tokens(variant, runs.steps), (of or runs).tokens(whole, runs.steps)
    both = [member for member in ours if member in theirs]
    return sum(ours[one] for one in both) / sum(theirs[one] for one in both) if both else math.nan


def _share(share: float) -> str:
    return NOT_RUN if math.isnan(share) else f"{share:.2f}"


def search_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Accuracy at each step and tokens written, lineage by lineage and against whole answers."""
    rows, numbers = [], {}
    for whole, others in SEARCHED[runs.world]:
        for variant in (whole, *others):
            share = share_written(runs, variant, whole)
            means = {step: list(runs.by_lineage(variant, step).values()) for step in steps}
            listed = (" ".join(f"{one:.1f}" for one in means[step]) or NOT_RUN for step in steps)
            rows.append([variant.title, *listed, _share(share)])
            numbers[variant.title] = {"accuracy": means, "tokens": share}
    return Table(["rollouts", *(f"step {step}, by lineage" for step in steps), "tokens"], rows), numbers


def searched() -> dict[str, list[Variant]]:
    """All variants of the search, by world."""
    return {world: [one for whole, others in rows for one in (whole, *others)] for world, rows in SEARCHED.items()}


class Tested(NamedTuple):
    """One method of the registered test."""

    whole: Variant
    ours: Variant
    control: Variant
    """Whole answers to as many prompts as ours has tokens, trained for half of the steps."""
    most: float
    """Share of the tokens of whole answers that ours may write."""


def _tested(method: Variant, prompts: int, most: float, **settings: Any) -> Tested:
    return Tested(method, stopped(method, **settings), fewer(method, prompts), most)


TESTED: Mapping[str, Sequence[Tested]] = {
    "clean": (_tested(OPD, 30, 0.5, threshold=0.5, block=2), _tested(KL, 31, 0.5, threshold=0.5, block=2)),
    "drift": (_tested(SURVIVAL, 17, 0.7, threshold=0.5), _tested(KL_SURVIVAL, 18, 0.7, threshold=0.5)),
}


def tested() -> dict[str, list[Variant]]:
    """What the test trains, by world."""
    return {world: [one for test in tests for one in (test.whole, test.ours)] for world, tests in TESTED.items()}


def halved() -> dict[str, list[Variant]]:
    """What it trains for half of the steps."""
    return {world: [test.control for test in tests] for world, tests in TESTED.items()}


def bars_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Accuracy by step, differences by lineage, tokens."""
    rows, numbers, half = [], {}, halfway(runs)
    for test in TESTED[runs.world]:
        for variant, place in ((test.whole, runs), (test.ours, runs), (test.control, half)):
            means = {step: place.accuracy(variant, step) for step in steps if step <= place.steps}
            share = share_written(place, variant, test.whole, of=runs)
            cells = [mean_alone(means[step]) if step in means else "" for step in steps]
            rows.append([variant.title, *cells, _share(share)])
            numbers[variant.title] = {"accuracy": {step: one.mean for step, one in means.items()}, "tokens": share}
    return Table(["rollouts", *(f"step {step}" for step in steps), "tokens"], rows), numbers


def halfway(runs: Runs) -> Runs:
    """The runs of the controls: half of the steps, up to an evaluation."""
    return replace(runs, steps=max(10, runs.steps // 2 // 10 * 10))


def registered(runs: Runs) -> list[str]:
    """The bars: tokens, no great loss at the end, ahead of the control half-way. Lineages are the units."""
    words, half = [], halfway(runs)
    for whole, ours, control, most in TESTED[runs.world]:
        share, spent = share_written(runs, ours, whole), share_written(half, control, whole, of=runs)
        if not math.isnan(share + spent):
            words.append(
                f"{ours.title}: {100 * share:.1f} % of the tokens of whole answers (bar: at most {100 * most:.0f} %); the "
                f"control {100 * spent:.1f} %."
            )
        late = runs.effect(ours, whole, runs.steps, family="late")
        kept = "excludes" if late.interval.low > -LOSS else "does not exclude"
        says = f"the interval {kept} a loss of more than {LOSS:g} points"
        words.append(in_words(f"{ours.title} minus whole answers at step {runs.steps}", late, says))
        ahead = runs.effect(ours, control, half.steps, of=half, family="ahead")
        words.append(in_words(f"{ours.title} minus {control.title} at step {half.steps}", ahead))
    return words

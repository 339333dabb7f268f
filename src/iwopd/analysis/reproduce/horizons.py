"""`iwopd reproduce thresholds` and `horizons`: answers that stop at drift against whole ones, and against fewer prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from iwopd.analysis.reproduce.runs import Effect, Runs
from iwopd.analysis.reproduce.tables import Table, established, p, signed
from iwopd.analysis.reproduce.variants import KL, KL_SURVIVAL, OPD, SURVIVAL, Variant
from iwopd.eval.statistics import Interval, t_quantile, t_two_sided

THRESHOLDS = (0.5, 0.2, 0.05, 0.01)
"""That the search tries."""
LEAST = 4
"""Lineages that a verdict takes."""
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
    """Tokens written over all steps of `runs`, as a share of those that whole answers take in the same steps (runs `of`)."""

    def written(place: Runs, one: Variant) -> float:
        tokens = place.metrics(one, "rollouts") * place.metrics(one, "rollout/length_mean")
        return float(tokens[:, : runs.steps].sum())

    return written(runs, variant) / written(of or runs, whole)


def search_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Accuracy at each step and tokens written, lineage by lineage and against whole answers."""
    rows, numbers = [], {}
    for whole, others in SEARCHED[runs.world]:
        for variant in (whole, *others):
            share = share_written(runs, variant, whole)
            means = {step: runs.scores(variant, step).mean(1).mul(100).tolist() for step in steps}
            rows.append([variant.title, *(" ".join(f"{one:.1f}" for one in means[step]) for step in steps), f"{share:.2f}"])
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
            means = {step: place.accuracy(variant, step).mean for step in steps if step <= place.steps}
            share = share_written(place, variant, test.whole, of=runs)
            cells = [f"{means[step]:.1f}" if step in means else "" for step in steps]
            rows.append([variant.title, *cells, f"{share:.2f}"])
            numbers[variant.title] = {"accuracy": means, "tokens": share}
    return Table(["rollouts", *(f"step {step}" for step in steps), "tokens"], rows), numbers


def halfway(runs: Runs) -> Runs:
    """The runs of the controls: half of the steps, up to an evaluation."""
    return replace(runs, steps=max(10, runs.steps // 2 // 10 * 10))


def registered(runs: Runs) -> list[str]:
    """The bars: tokens, no great loss at the end, ahead of the control half-way. Lineages are the units."""
    words, half = [], halfway(runs)
    for whole, ours, control, most in TESTED[runs.world]:
        share, spent = share_written(runs, ours, whole), share_written(half, control, whole, of=runs)
        words.append(
            f"{ours.title}: {100 * share:.1f} % of the tokens of whole answers (bar: at most {100 * most:.0f} %); the control "
            f"{100 * spent:.1f} %."
        )
        late = by_lineage(runs, ours, runs, whole, runs.steps)
        kept = "excludes" if late.interval.low > -LOSS else "does not exclude"
        words.append(
            f"{ours.title} minus whole answers at step {runs.steps}: "
            + over_lineages(late, f"the interval {kept} a loss of more than {LOSS:g} points")
        )
        ahead = by_lineage(runs, ours, half, control, half.steps)
        sign = "established" if ahead.interval.mean > 0 else "established, the other way round"
        verdict = sign if established(ahead) else "not distinguishable from zero"
        words.append(f"{ours.title} minus {control.title} at step {half.steps}: {over_lineages(ahead, verdict)}")
    return words


def over_lineages(effect: Effect, verdict: str) -> str:
    """With its verdict, if there are lineages enough for one."""
    if effect.runs < LEAST:
        return f"{effect.interval.mean:+.1f} points over {effect.runs} lineages: too few to tell, a verdict takes {LEAST}."
    return f"{signed(effect)} points over {effect.runs} lineages (p {p(effect)}): {verdict}."


def by_lineage(runs: Runs, variant: Variant, others: Runs, other: Variant, step: int) -> Effect:
    """Paired difference in points, seeds averaged within a lineage: a t interval over lineages."""
    difference = (runs.scores(variant, step) - others.scores(other, step)).mean(1)  # [lineages x seeds]
    means = difference.view(len(runs.lineages), -1).mean(1).mul(100.0)
    count, mean = len(means), float(means.mean())
    error = max(float(means.std()) / count**0.5, 1e-12) if count > 1 else math.nan
    half = t_quantile(0.95, count - 1.0) * error if count > 1 else math.nan
    return Effect(Interval(mean, mean - half, mean + half), t_two_sided(mean / error, count - 1.0) if count > 1 else 1.0, count)

"""`iwopd reproduce rivals` and `gate`: survival weights against their simplest rivals, and the gate between keeping and
dropping what follows a drift against the better of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from iwopd.analysis.reproduce.horizons import stopped
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import NOT_RUN, Table, in_words, p, show, signed
from iwopd.analysis.reproduce.variants import IW_OPD, KL, KL_SURVIVAL, OPD, PREFIX, SURVIVAL, Variant, method
from iwopd.methods import GAMMAS

FIXED_TOKENS: Mapping[str, int] = {"clean": 20, "drift": 32, "long": 80}
"""Of the fixed horizon, by world: about 30 % of an answer."""
LOSS = 2.0
"""Points that the gate may lose against the better of keeping and dropping."""

IW_GAMMAS = tuple(
    IW_OPD if gamma == 0.5 else Variant(f"IW-OPD, gamma {gamma:g}", {"weights": "cumulative-share", "params": {"gamma": gamma}})
    for gamma in GAMMAS
)
LINEAR = method("linear-decay")
LINEAR_4 = Variant("Linear decay, gamma 4", {"weights": "linear-decay", "params": {"gamma": 4.0}})
PREFIX_10 = Variant("Prefix-10", {"weights": "prefix-only", "params": {"ratio": 0.1}})
UNTIL_DRIFT, SURVIVAL_SHARE = method("until-drift"), method("survival-share")
GATED = method("kl-gated")
GATED_STOPPED = GATED.with_rollout(f"{GATED.title}, stopped by the gate", horizon={"type": "drift", "weights": "gated"})
GATE = (KL, KL_SURVIVAL, GATED)
"""The test of the gate: the two that it chooses between, and itself."""

MINI_BATCHES = 8
UPDATES = tuple(
    replace(variant, title=f"{variant.title}, {MINI_BATCHES} updates a batch", optim={"mini_batches": MINI_BATCHES})
    for variant in (OPD, IW_OPD, SURVIVAL)
)
"""Eight updates a batch: after the first of them the ratio of the PPO loss is not 1 any more."""


def fixed(world: str) -> Variant:
    """OPD on answers that end after a fixed number of tokens."""
    tokens = FIXED_TOKENS[world]
    return OPD.with_rollout(f"{OPD.title}, first {tokens} tokens", horizon={"type": "fixed", "tokens": tokens})


def rivals(world: str) -> tuple[Variant, ...]:
    """Survival first, then whatever it must be told from, simplest questions first."""
    return (
        SURVIVAL,
        OPD,
        IW_OPD,
        PREFIX,
        UNTIL_DRIFT,
        LINEAR_4,
        IW_GAMMAS[-1],
        stopped(OPD),
        PREFIX_10,
        SURVIVAL_SHARE,
        fixed(world),
        LINEAR,
        IW_GAMMAS[1],
        IW_GAMMAS[2],
    )


def drawn(world: str) -> tuple[Variant, ...]:
    """Those whose learning curves can still be told apart in one figure."""
    return SURVIVAL, stopped(OPD), UNTIL_DRIFT, PREFIX, IW_OPD, OPD


def rivals_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Accuracy of every rival, and survival minus it."""
    columns = ["method", *(f"step {step}" for step in steps)]
    columns += [head for step in steps for head in (f"survival minus it, {step}", "Holm's p")]
    rows, numbers = [], {}
    for variant in rivals(runs.world):
        row = [variant.title, *(show(runs.accuracy(variant, step)) for step in steps)]
        effects = {} if variant is SURVIVAL else {step: runs.effect(SURVIVAL, variant, step) for step in steps}
        row += [cell for step in steps for cell in ((signed(effects[step]), p(effects[step])) if effects else ("", ""))]
        rows.append(row)
        numbers[variant.title] = {
            "accuracy": {step: runs.accuracy(variant, step) for step in (0, *steps)},
            "survival minus it": {step: one.interval for step, one in effects.items()},
        }
    return Table(columns, rows), numbers


def rivals_words(runs: Runs, steps: Sequence[int]) -> list[str]:
    """Whom survival is told from, step by step."""
    words = []
    for step in steps:
        found = {variant.title: runs.effect(SURVIVAL, variant, step) for variant in rivals(runs.world)[1:]}
        enough = {title: effect for title, effect in found.items() if effect.enough}
        if enough:
            ahead = [title for title, one in enough.items() if one.established and one.interval.mean > 0]
            behind = [title for title, one in enough.items() if one.established and one.interval.mean < 0]
            told = (", ".join(titles) or "none" for titles in (ahead, behind))
            words.append("At step {} survival is established ahead of: {}; behind: {}.".format(step, *told))
    for ours, theirs in ((PREFIX, OPD), (IW_OPD, OPD), (stopped(OPD), OPD), (KL_SURVIVAL, SURVIVAL)):
        for step in steps:
            effect = runs.effect(ours, theirs, step, family="afterwards")
            words.append(in_words(f"Looked at afterwards: {ours.title} minus {theirs.title} at step {step}", effect))
    whole, cut = (runs.tokens(variant, runs.steps) for variant in (OPD, stopped(OPD)))
    if shares := [cut[member] / whole[member] for member in whole if member in cut]:
        listed = " ".join(f"{100 * share:.0f}" for share in shares)
        words.append(f"{stopped(OPD).title} writes so many percent of the tokens of whole answers, run by run: {listed}.")
    return words


def gate_table(runs: Runs, steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Accuracy of the three, lineage by lineage."""
    rows, numbers = [], {}
    for variant in (*GATE, GATED_STOPPED):
        found = {step: runs.by_lineage(variant, step) for step in (0, *steps)}
        cells = (" ".join(f"{value:.1f}" for value in found[step].values()) or NOT_RUN for step in steps)
        rows.append([variant.title, *(show(runs.accuracy(variant, step)) for step in steps), *cells])
        numbers[variant.title] = {"accuracy": {step: runs.accuracy(variant, step) for step in found}, "lineages": found}
    columns = ["weights", *(f"step {step}" for step in steps), *(f"step {step}, by lineage" for step in steps)]
    return Table(columns, rows), numbers


def gate_words(runs: Runs, steps: Sequence[int]) -> list[str]:
    """The registered bar: within two points of the better of uniform and survival weights at every step."""
    words = []
    for step in steps:
        better = runs.best((KL, KL_SURVIVAL), step)
        effect = runs.effect(GATED, better, step)
        met = "met" if effect.interval.mean > -LOSS else "missed"
        kept = "excludes" if effect.interval.low > -LOSS else "does not exclude"
        says = f"bar (mean loss below {LOSS:g} points) {met}; the interval {kept} a loss of more than {LOSS:g} points"
        words.append(in_words(f"Gated minus the better at step {step} ({better.title})", effect, says))
    for step in steps:
        words.append(in_words(f"Survival minus uniform weights at step {step}", runs.effect(KL_SURVIVAL, KL, step)))
    whole, cut = (runs.tokens(variant, runs.steps) for variant in (GATED, GATED_STOPPED))
    if both := [member for member in whole if member in cut]:
        share = sum(cut[member] for member in both) / sum(whole[member] for member in both)
        words.append(f"{GATED_STOPPED.title} writes {100 * share:.1f} % of the tokens of whole answers ({len(both)} runs).")
    return words

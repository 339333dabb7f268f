"""Does a probe, made before training, predict which method does best after it?

    run records, probe records --pairs_of--> Pairs --rank_agreement--> rank correlations
                                                   --regrets-------> points lost by following the probe, or one method always
                                                   --split_half----> a choice on even lineages, reported on odd ones

A pair is a student and a teacher: a lineage in a world. It is the unit of every mean and interval here; seeds are averaged
within it. Records are plain dictionaries (`pairs_of` has their fields); nothing is loaded or trained.

Methods are compared within a family, because the step from sampled tokens to whole distributions is another question than
how tokens are weighted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from iwopd.algo.drift_weights import LEAST
from iwopd.algo.objectives import make_objective
from iwopd.algo.ranking import spearman
from iwopd.analysis.probe.result import Estimate
from iwopd.eval.statistics import LEAST_UNITS, over_units
from iwopd.methods import GAMMAS, METHODS, TITLES, identity, probed_methods

Record = Mapping[str, Any]
Place = tuple[str, int, str]
"""World, lineage, and the names of both models' weights."""
LEAST_PAIRS = LEAST_UNITS
"""Pairs that an interval takes, and a half of them that a statement is made of."""
LEAST_METHODS = 3
"""Methods that a ranking takes: of two, every correlation is 1 or -1."""
MARGINS = (0.0, 0.02, 0.05, 0.1)
"""How far the largest cosine must lie above that of uniform weights (OPD), else uniform weights are chosen."""
THRESHOLDS = (0.0, 0.1, 0.2, 0.3)
"""Agreements below which tokens after a drift are left to survival weights."""
THRESHOLD = LEAST
"""The one that `advise` uses: the gate's own, from which such tokens begin to count."""

SAMPLED = (
    "opd",
    "iw-opd",
    *(f"iw-opd-{gamma:g}" for gamma in GAMMAS if gamma != 0.5),
    "survival",
    "survival-share",
    "until-drift",
    "prefix-30",
    "linear-decay",
    "linear-decay-4",
)
WHOLE = ("kl", "kl-survival", "kl-gated")
UNTOUCHED = WHOLE[0]
"""The method whose first batch is looked at: every token counts, and the cosine is of whole distributions."""
KEYS = {
    **{title: name for name, title in TITLES.items() if name in (*SAMPLED, *WHOLE)},
    **{f"IW-OPD, gamma {gamma:g}": "iw-opd" if gamma == 0.5 else f"iw-opd-{gamma:g}" for gamma in GAMMAS},
    "Linear decay, gamma 4": "linear-decay-4",
}
"""Methods by the title of their runs."""


class Family(NamedTuple):
    """Methods that are compared with each other."""

    name: str
    words: str
    methods: tuple[str, ...]
    plain: str
    """Uniform weights."""
    survival: str
    always: tuple[str, ...]
    """Rivals of the probe: one method whatever it says."""


FAMILIES = (
    Family("sampled", "the sampled token", SAMPLED, "opd", "survival", ("opd", "iw-opd", "survival")),
    Family("whole", "whole distributions", WHOLE, "kl", "kl-survival", WHOLE),
)


# --- pairs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """What a probe said of a student and a teacher, and what training did."""

    world: str
    lineage: int
    cosines: Mapping[str, float]
    """By method: of its update with the gradient towards correct solutions, before training."""
    agreement: float | None
    """Of gradients before and after drifts (`algo.agreement`), before training; needs no answers."""
    accuracy: Mapping[str, Mapping[int, float]]
    """By method and step, in percent, seeds averaged."""

    def reached(self, family: Family, step: int) -> dict[str, float]:
        """Accuracy of the family's methods that were trained, in percent."""
        found = ((name, self.accuracy.get(name, {}).get(step)) for name in family.methods)
        return {name: value for name, value in found if value is not None}

    def best(self, family: Family, step: int) -> float:
        """Of the best method in hindsight."""
        return max(self.reached(family, step).values())


def pairs_of(runs: Iterable[Record], probes: Iterable[Record]) -> list[Pair]:
    """Pairs that were both probed and trained, by world and lineage.

    A run record has `world`, `lineage`, `seed`, `accuracy` (step: percent), and `settings` (those that are not the default, by
    dotted name) or a `title`. A probe record has `world`, `lineage`, and `cosines` (method: number) or `alignment.rules`
    (method: mean, low, high), and `agreement`; several records of one pair complete each other. Of runs that differ in settings
    beside the method (a learning rate, a horizon), a world's most frequent ones are taken. Both may name the weights of their
    models (`models`): a lineage has others on another kind of processor, and what began from those is no run of this pair.
    """
    known: dict[Place, dict[str, Any]] = {}
    for record in probes:
        place = known.setdefault(place_of(record), {"cosines": {}, "agreement": None})
        place["cosines"] |= _cosines(record)
        if (agreement := number(record.get("agreement"))) is not None:
            place["agreement"] = agreement
    reached: dict[Place, dict[str, dict[int, list[float]]]] = {}
    known_methods = [(record, method) for record in runs if (method := method_of(record)) is not None]
    usual = _alike([record for record, _ in known_methods])
    for record, method in known_methods:
        if _shared(record) != usual[str(record["world"])]:
            continue
        steps = reached.setdefault(place_of(record), {}).setdefault(method, {})
        for step, value in record["accuracy"].items():
            steps.setdefault(int(step), []).append(float(value))
    return [
        Pair(*place[:2], accuracy={method: _means(steps) for method, steps in reached[place].items()}, **known[place])
        for place in sorted(known.keys() & reached.keys())
    ]


def first_batches(runs: Iterable[Record], count: int = 1) -> list[dict[str, Any]]:
    """What runs themselves saw before their first update, as probe records: the agreement of the first batch under uniform
    weights and whole distributions. One batch is less than a probe, and without solutions there are no cosines. The mean of
    the first `count` is what a longer look might have seen, were the student not learning meanwhile.
    """
    found = []
    for record in runs:
        measured = [value for value in (record.get("agreement") or [])[:count] if value is not None]
        if method_of(record) == UNTOUCHED and len(measured) == count:
            place = {name: record.get(name) for name in ("world", "lineage", "models")}
            found.append({**place, "agreement": math.fsum(measured) / count})
    return found


def place_of(record: Record) -> Place:
    """The pair of a run or a probe."""
    return str(record["world"]), int(record["lineage"]), json.dumps(record.get("models"), sort_keys=True)


def method_of(record: Record) -> str | None:
    """The method of a run: by its settings where it has them (titles may name more than the method), else by its title."""
    settings = record.get("settings")
    if settings is None:
        return KEYS.get(str(record.get("title")))
    section = {name.removeprefix("method."): value for name, value in settings.items() if name.startswith("method.")}
    try:
        wanted = identity(make_objective(section))
    except (ValueError, TypeError, ImportError):  # of a version or a plug-in that is not here
        return None
    return next((name for name, own in _identities() if own == wanted), None)


def method_section(name: str) -> Mapping[str, Any]:
    """The `[method]` section of a name of the catalogue, or of `iwopd probe` (`iw-opd-4`)."""
    return METHODS[name] if name in METHODS else probed_methods()[name][1]


@cache
def _identities() -> list[tuple[str, tuple[Any, ...]]]:
    return [(name, identity(make_objective(method_section(name)))) for name in (*SAMPLED, *WHOLE)]


def _shared(record: Record) -> str:
    """The settings beside the method."""
    settings = record.get("settings") or {}
    return json.dumps({name: value for name, value in sorted(settings.items()) if not name.startswith("method.")})


def _alike(runs: Sequence[Record]) -> dict[str, str]:
    """The most frequent settings of each world; of equally frequent ones the first by name."""
    counts: dict[str, Counter[str]] = {}
    for record in runs:
        counts.setdefault(str(record["world"]), Counter())[_shared(record)] += 1
    return {world: min(found, key=lambda one: (-found[one], one)) for world, found in counts.items()}


def _cosines(record: Record) -> dict[str, float]:
    listed = record.get("cosines") or (record.get("alignment") or {}).get("rules") or {}
    means = {key: value[0] if isinstance(value, Sequence) else value for key, value in listed.items()}
    numbers = {"iw-opd" if key == "iw-opd-0.5" else key: number(value) for key, value in means.items()}
    return {key: value for key, value in numbers.items() if value is not None}


def number(value: Any) -> float | None:
    """None for what is no number."""
    return None if value is None or not math.isfinite(value) else float(value)


def _means(steps: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {step: math.fsum(values) / len(values) for step, values in sorted(steps.items())}


def over_pairs(values: Sequence[float], least: float = -math.inf) -> Estimate:
    """Mean over pairs, with Student's t interval (not below `least`) if there are pairs enough for one."""
    if not values:
        return Estimate(mean=None)
    found = over_units(values)
    if not found.enough:
        return Estimate(mean=found.interval.mean)
    return Estimate(mean=found.interval.mean, low=max(least, found.interval.low), high=found.interval.high)


# --- rankings --------------------------------------------------------------------------------------------------------


class RankAgreement(NamedTuple):
    """Spearman's correlation of cosines and accuracies over methods, pair by pair."""

    by_pair: Mapping[tuple[str, int], float]
    overall: Estimate
    """Mean over pairs, with Student's t interval."""
    by_world: Mapping[str, Estimate]


def rank_agreement(pairs: Sequence[Pair], family: Family, step: int) -> RankAgreement:
    """Over the methods that have both numbers; pairs with fewer than three of them are left out."""
    found: dict[tuple[str, int], float] = {}
    for pair in pairs:
        reached = pair.reached(family, step)
        both = [name for name in reached if name in pair.cosines]
        rho = spearman([pair.cosines[name] for name in both], [reached[name] for name in both])
        if len(both) >= LEAST_METHODS and not math.isnan(rho):
            found[pair.world, pair.lineage] = rho
    worlds = dict.fromkeys(world for world, _ in found)
    by_world = {name: over_pairs([rho for (world, _), rho in found.items() if world == name]) for name in worlds}
    return RankAgreement(found, over_pairs(list(found.values())), by_world)


class GateRecord(NamedTuple):
    """What the agreement, one number a pair, says of survival against uniform weights."""

    correlation: float
    """Spearman's over pairs, of the agreement and the gain of survival: negative if it tells where survival helps."""
    right: int
    """Pairs in which the threshold chose the better of the two."""
    pairs: int


def gate_record(pairs: Sequence[Pair], family: Family, step: int, threshold: float = THRESHOLD) -> GateRecord:
    """Over pairs with an agreement and both methods."""
    found = []
    for pair in pairs:
        reached = pair.reached(family, step)
        if pair.agreement is not None and {family.plain, family.survival} <= reached.keys():
            found.append((pair.agreement, reached[family.survival] - reached[family.plain]))
    right = sum((agreement < threshold) == (gain > 0) for agreement, gain in found)
    rho = spearman([agreement for agreement, _ in found], [gain for _, gain in found])
    return GateRecord(rho if len(found) >= LEAST_METHODS else math.nan, right, len(found))


# --- following the probe ---------------------------------------------------------------------------------------------


class Chooser(NamedTuple):
    """A way to choose a method from a probe."""

    name: str
    statistic: str
    """cosine, agreement, or always (one method, whatever the probe says)."""
    value: float | str
    """The margin, the threshold, or the method."""

    def choose(self, pair: Pair, family: Family, step: int) -> str | None:
        """The method; None where the probe lacks what it needs, or the choice was not trained up to this step."""
        trained = pair.reached(family, step)
        if self.statistic == "always":
            chosen: str | None = str(self.value)
        elif self.statistic == "agreement":
            lower = None if pair.agreement is None else pair.agreement < float(self.value)
            chosen = None if lower is None else family.survival if lower else family.plain
        else:
            known = {name: pair.cosines[name] for name in trained if name in pair.cosines}
            chosen = max(known, key=lambda name: known[name]) if family.plain in known else None  # the first of equals
            if chosen is not None and known[chosen] - known[family.plain] < float(self.value):
                chosen = family.plain
        return chosen if chosen in trained else None


def choosers() -> list[Chooser]:
    """What is tried, in the order in which the first of equally good ones is taken."""
    by_cosine = [
        Chooser(f"largest cosine, if {margin:g} above uniform weights'" if margin else "largest cosine", "cosine", margin)
        for margin in MARGINS
    ]
    return by_cosine + [Chooser(f"survival where the agreement is below {one:g}", "agreement", one) for one in THRESHOLDS]


def always(family: Family) -> list[Chooser]:
    """The rivals."""
    return [Chooser(f"always {TITLES[name]}", "always", name) for name in family.always]


class Regret(NamedTuple):
    """Points that a way of choosing loses against the best method in hindsight."""

    chooser: Chooser
    by_pair: Mapping[tuple[str, int], float]
    mean: Estimate
    difference: Estimate | None = None
    """The probe's regret minus this one's, paired: negative if the probe is the better guide."""


def regret(pairs: Sequence[Pair], chooser: Chooser, family: Family, step: int) -> Regret:
    """Over the pairs where it can choose."""
    found = {}
    for pair in pairs:
        if (chosen := chooser.choose(pair, family, step)) is not None:
            found[pair.world, pair.lineage] = pair.best(family, step) - pair.reached(family, step)[chosen]
    return Regret(chooser, found, over_pairs(list(found.values()), least=0.0))


def regrets(pairs: Sequence[Pair], probe: Chooser, family: Family, step: int) -> list[Regret]:
    """Of following the probe, then of each rival with the paired difference."""
    ours = regret(pairs, probe, family, step)
    listed = [ours]
    for rival in always(family):
        theirs = regret(pairs, rival, family, step)
        both = [value - theirs.by_pair[place] for place, value in ours.by_pair.items() if place in theirs.by_pair]
        listed.append(theirs._replace(difference=over_pairs(both)))
    return listed


class SplitHalf(NamedTuple):
    """A way of choosing that was chosen on even lineages, and what it lost on odd ones."""

    tried: Sequence[Regret]
    """On even lineages."""
    chosen: Chooser
    reported: Sequence[Regret]
    """On odd lineages: the chosen one first, then its rivals."""


def split_half(pairs: Sequence[Pair], family: Family, step: int) -> SplitHalf | None:
    """Choose by least mean regret on pairs with even lineages, report on the others. None: too few pairs to tell.

    Only ways of choosing that can choose on all pairs that any of them can choose on are compared.
    """
    even, odd = ([pair for pair in pairs if pair.lineage % 2 == half] for half in (0, 1))
    tried = [regret(even, one, family, step) for one in choosers()]
    most = max(len(one.by_pair) for one in tried)
    tried = [one for one in tried if len(one.by_pair) == most]
    if most < LEAST_PAIRS:
        return None
    chosen = min(tried, key=lambda one: _mean(one.mean)).chooser
    reported = regrets(odd, chosen, family, step)
    return SplitHalf(tried, chosen, reported) if len(reported[0].by_pair) >= LEAST_PAIRS else None


def _mean(estimate: Estimate) -> float:
    return math.inf if estimate.mean is None else estimate.mean

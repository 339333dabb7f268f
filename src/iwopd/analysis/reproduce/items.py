"""The paper's phenomena, P1 to P10, and a rule of our own: which runs each needs, and what is read off them.

P2 and P6 need no training; they come from `iwopd probe` on the same models (`probes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from iwopd.analysis.reproduce import horizons, objectives, rivals, tokenizers
from iwopd.analysis.reproduce.effects import Families, minus
from iwopd.analysis.reproduce.records import Record
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import NOT_RUN, ItemSection, Table, established, in_words, p, show, signed
from iwopd.analysis.reproduce.variants import (
    ABLATIONS,
    DIVERGENCES,
    EXOPD,
    IDEAL,
    IW_EXOPD,
    IW_MEAN_ONE,
    IW_OPD,
    KL,
    KL_SURVIVAL,
    OBJECTIVES,
    OPD,
    OPD_FASTER,
    PREFIX,
    SUFFIX,
    SURVIVAL,
    Variant,
    faster,
    method,
    sized,
    taught,
)

SIZES = ("small", "medium", "large")
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Learning rates that `own` tries, as multiples of --lr."""
PAPER = {
    "p1": "Fig. 1a: the first 30 % match full OPD, the last 30 % barely learn",
    "p2": "Fig. 1b: the teacher's accuracy falls towards the student's as the prefix grows",
    "p3": "Fig. 2a, Tab. 1-3: faster at step 10, at least as high at the end",
    "p4": "Fig. 2b: the advantage grows with the teacher/student size ratio",
    "p5": "Fig. 3a-b: falls and plateaus above zero",
    "p6": "Fig. 3c: falls faster under the teacher",
    "p7": "Fig. 4a-c: sensitive to alpha; signed sums rebound",
    "p8": "Tab. 4: share > curriculum > linear > fixed > OPD; unsigned > signed; blend > surrogate only > ideal",
    "p9": "Tab. 7: the weights add on top of ExOPD",
    "p10": "Tab. 1-2: under OPD the stronger teacher is behind at step 10 and ahead at the end; IW-OPD removes the deficit",
    "own": "not in the paper: weights that fall with the nats already lost, not with their share",
    "objectives": "not in the paper: whole distributions instead of the sampled token, under the same weights",
    "thresholds": "not in the paper: where answers stop; a search",
    "horizons": "not in the paper: only what teaches is written",
    "divergences": "not in the paper: other divergences, and the likeliest ids only",
    "tokenizers": "not in the paper: a teacher with another tokenizer",
    "rivals": "not in the paper: survival weights against their simplest rivals",
    "rates": "not in the paper: survival weights and their rivals, each at three learning rates; a search",
    "updates": "not in the paper's tables: several updates a batch, so that the ratio of policies is not 1",
    "gate": "not in the paper: weights that follow the agreement of gradients before and after drifts",
}
"""What the paper shows, and where."""
Probes = Mapping[int, Record]
"""What is kept of `iwopd probe` (`records.probe_record`), by lineage."""


@dataclass(frozen=True)
class Item:
    """One phenomenon of the paper."""

    key: str
    title: str
    variants: Sequence[Variant]
    read: Read
    noise_of: Sequence[Variant] = ()
    """Methods whose gradient noise it shows."""
    lineages: int = 4
    seeds: int = 2
    """How many there are by default."""
    by_world: Mapping[str, Sequence[Variant]] = field(default_factory=dict)
    """Variants of an item that trains others in each world."""
    halved: Mapping[str, Sequence[Variant]] = field(default_factory=dict)
    """Further ones that need half of the steps only (`horizons.halfway`)."""

    @property
    def needs_probe(self) -> bool:
        return not (self.variants or self.by_world)

    def trained(self, world: str) -> Sequence[Variant]:
        """What must be trained for it in this world."""
        return self.by_world.get(world, self.variants)

    def section(self, runs: Runs, probes: Probes) -> ItemSection:
        """Read twice: first for the comparisons that it makes, then with Holm's correction over all of them."""
        families = Families()
        together = replace(runs, families=families)
        self.read(self, together, probes)
        families.correct()
        found = self.read(self, together, probes)
        return replace(found, words=[*found.words, *self._missing(runs, probes)])

    def make(self, tables: Sequence[Table], words: Sequence[str], **numbers: Any) -> ItemSection:
        """Sentences about runs that are missing are empty, and left out."""
        return ItemSection(self.key, self.title, PAPER[self.key], tables, [one for one in words if one], numbers)

    def _missing(self, runs: Runs, probes: Probes) -> list[str]:
        gone = runs.missing(self.trained(runs.world))
        gone += horizons.halfway(runs).missing(self.halved.get(runs.world, ()))
        unprobed = [str(lineage) for lineage in runs.lineages if self.needs_probe and lineage not in probes]
        gone += [f"probes of lineages {', '.join(unprobed)}"] if unprobed else []
        return [f"Not run: {'; '.join(gone)}."] if gone else []


Read = Callable[[Item, Runs, Probes], ItemSection]
ITEMS: dict[str, Item] = {}


def _item(key: str, title: str, *variants: Variant, **design: Any) -> Callable[[Read], Read]:
    """Register the decorated function: it reads an item's section off the runs of its variants, or off the probes."""

    def register(read: Read) -> Read:
        ITEMS[key] = Item(key, title, variants, read, **design)
        return read

    return register


def _steps(runs: Runs) -> list[int]:
    return sorted({10, runs.steps // 2 // 10 * 10, runs.steps} - {0})


def _comparison(runs: Runs, variants: Sequence[Variant], baseline: Variant) -> tuple[Table, dict[str, Any]]:
    """Accuracy of every variant at each step and its paired difference to the baseline at the first and last of them."""
    steps = _steps(runs)
    first, last = steps[0], steps[-1]
    rows, numbers = [], {}
    for variant in variants:
        row = [variant.title, *(show(runs.accuracy(variant, step)) for step in steps)]
        cells: dict[str, Any] = {"accuracy": {step: runs.accuracy(variant, step) for step in (0, *steps)}}
        if variant is baseline:
            row += [""] * 4
        else:
            early, late = runs.effect(variant, baseline, first), runs.effect(variant, baseline, last)
            row += [signed(early), p(early), signed(late), p(late)]
            cells |= {"early": early.interval, "late": late.interval, "p": late.holm, "lineages": late.units}
        rows.append(row)
        numbers[variant.title] = cells
    differences = [head for step in (first, last) for head in (f"vs {baseline.title}, {step}", "Holm's p")]
    return Table(["method", *(f"step {step}" for step in steps), *differences], rows), numbers


@_item("p1", "first or last 30 % of the tokens", OPD, PREFIX, SUFFIX)
def _p1(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, OPD)
    base = runs.accuracy(OPD, 0)
    prefix, suffix = (_at_the_end(runs, variant, OPD) for variant in (PREFIX, SUFFIX))
    far = runs.accuracy(SUFFIX, runs.steps).mean - base.mean
    ends = "" if math.isnan(far) else f"Suffix-30 ends {far:+.1f} points from the base."
    words = [f"Base {show(base)}. {prefix}".strip(), f"{suffix} {ends}".strip()]
    return item.make([table], words, methods=numbers)


@_item("p2", "hand-off")
def _p2(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    found = {lineage: probe["handoff"] for lineage, probe in probes.items() if "handoff" in probe}
    fractions: list[float] = next((one["fractions"] for one in found.values()), [])
    rows = []
    for lineage, one in found.items():
        means = (f"{_percent(mean):.1f}" for mean in (*one["teacher"], one["student"]))
        rows.append([str(lineage), *means])
    columns = ["lineage", *(f"{fraction:.0%}" for fraction in fractions), "student alone"]
    listed = "; ".join("{:.0f} ({:.0f} to {:.0f})".format(*map(_percent, one["fall"])) for one in found.values())
    what = f"From nothing to {max(fractions, default=0):.0%} of the student's answer the teacher loses"
    falls = {lineage: _percent(one["fall"][0]) for lineage, one in found.items()}
    words = [f"{what}, in points, lineage by lineage (intervals over prompts): {listed}."] if found else []
    words.append(in_words("Fall of its accuracy on that way", runs.judged("fall", falls)))
    return item.make([Table(columns, rows)], words, falls=[one["fall"][0] for one in found.values()])


def _at_the_end(runs: Runs, variant: Variant, baseline: Variant) -> str:
    return in_words(f"{variant.title} minus {baseline.title} at the last step", runs.effect(variant, baseline, runs.steps))


def _percent(value: float | None) -> float:
    return 100.0 * _number(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@_item("p3", "IW-OPD against OPD", OPD, IW_OPD, OPD_FASTER, IW_MEAN_ONE)
def _p3(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, OPD)
    steps = (_steps(runs)[0], runs.steps)
    words = [in_words(f"IW-OPD minus OPD at step {step}", runs.effect(IW_OPD, OPD, step)) for step in steps]
    words.append(in_words("Control, OPD at 1.25 x lr minus OPD at the last step", runs.effect(OPD_FASTER, OPD, runs.steps)))
    words.append(in_words("IW-OPD minus OPD at 1.25 x lr at the last step", runs.effect(IW_OPD, OPD_FASTER, runs.steps)))
    return item.make([table], words, methods=numbers)


@_item("p4", "size ratio", *(sized(variant, size) for size in SIZES for variant in (OPD, IW_OPD)))
def _p4(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    first, last = _steps(runs)[0], runs.steps
    rows, numbers = [], {}
    for size in SIZES:
        opd, iw = sized(OPD, size), sized(IW_OPD, size)
        early, late = runs.effect(iw, opd, first), runs.effect(iw, opd, last)
        scores = [show(runs.accuracy(*place)) for place in ((opd, 0), (opd, last), (iw, last))]
        rows.append([size, *scores, signed(early), p(early), signed(late), p(late)])
        numbers[size] = {"early": early.interval, "late": late.interval}
    columns = ["student", "base", "OPD", "IW-OPD", f"difference, {first}", "Holm's p", f"difference, {last}", "Holm's p"]
    grows = numbers["small"]["late"].mean > numbers["medium"]["late"].mean > numbers["large"]["late"].mean
    gains = {size: runs.difference(sized(IW_OPD, size), sized(OPD, size), last) for size in SIZES}
    ends = runs.judged("small - large", minus(gains["small"], gains["large"]))
    order = f"The differences are {'' if grows else 'not '}ordered as in the paper"
    trend = in_words(f"Difference of the small student minus that of the large one at step {last}", ends)
    words = [f"The smaller the student, the larger the size ratio. {order}. {trend}"] if ends.units else []
    return item.make([Table(columns, rows)], words, sizes=numbers)


@_item("p5", "KL during training", OPD, IW_OPD)
def _p5(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    columns = ["method", "first step", "a quarter", "half", "last tenth", "fall"]
    rows, numbers = [], {}
    for variant in item.variants:
        found = runs.kl(variant)
        if not len(found):
            rows.append([variant.title, *[NOT_RUN] * 5])
            continue
        kl = found.mean(0)
        tail = kl[-max(1, runs.steps // 10) :].mean()
        values = [kl[0], kl[runs.steps // 4 - 1], kl[runs.steps // 2 - 1], tail]
        rows.append([variant.title, *(f"{float(value):.3f}" for value in values), f"{100 * float(1 - tail / kl[0]):.0f} %"])
        numbers[variant.title] = kl.tolist()
    words = ["Mean of lp_0 - lp_T over the tokens of a step's rollouts, in nats, averaged over all runs."]
    return item.make([Table(columns, rows)], words, kl=numbers)


@_item("p6", "likelihood of prefixes")
def _p6(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    rows = []
    for lineage, probe in probes.items():
        if "likelihood" in probe:
            parts = (probe["likelihood"][name] for name in ("student", "teacher", "difference"))
            rows.append([str(lineage), *("{:.1f} ({:.1f} to {:.1f})".format(*map(_number, part)) for part in parts)])
    words = [
        "Log-likelihood of whole answers of the untrained student, in nats, intervals over prompts; curves: `iwopd probe`."
    ]
    return item.make([Table(["lineage", "student", "teacher", "teacher minus student"], rows)], words)


@_item("p7", "ideal ratio weights", OPD, *IDEAL, method("signed"), IW_OPD)
def _p7(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, OPD)
    made = [one for one in IDEAL if not math.isnan(runs.accuracy(one, runs.steps).mean)] or list(IDEAL)
    worst, best = (choose(made, key=lambda one: runs.accuracy(one, runs.steps).mean) for choose in (min, max))
    signs = in_words("Signed minus unsigned (IW-OPD) at the last step", runs.effect(method("signed"), IW_OPD, runs.steps))
    return item.make([table], [_at_the_end(runs, worst, best), signs], methods=numbers)


@_item("p8", "ablations", OPD, *ABLATIONS, SURVIVAL)
def _p8(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, OPD)
    apart = [v.title for v in item.variants if v is not OPD and established(runs.effect(v, OPD, runs.steps))]
    found = ", ".join(apart) if apart else "none"
    enough = any(runs.effect(variant, OPD, runs.steps).enough for variant in item.variants if variant is not OPD)
    words = [f"Different from OPD at the last step, after Holm's correction: {found}."] if enough else []
    by_position = [("curriculum", "linear-decay"), ("linear-decay", "fixed-prefix")]
    for better, worse in (*by_position, ("iw-opd", "signed"), ("iw-opd", "surrogate-only")):
        effect = runs.effect(method(better), method(worse), runs.steps)
        words.append(in_words(f"{method(better).title} minus {method(worse).title}", effect))
    return item.make([table], words, methods=numbers)


@_item("p9", "ExOPD", EXOPD, IW_EXOPD)
def _p9(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, EXOPD)
    return item.make([table], [_at_the_end(runs, IW_EXOPD, EXOPD)], methods=numbers)


@_item("p10", "stronger and weaker teacher", *(taught(v, teacher) for teacher in ("weak", "strong") for v in (OPD, IW_OPD)))
def _p10(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    first, last = _steps(runs)[0], runs.steps
    rows = [[variant.title, *(show(runs.accuracy(variant, step)) for step in (first, last))] for variant in item.variants]
    words = []
    for who in (OPD, IW_OPD):
        for step in (first, last):
            effect = runs.effect(taught(who, "strong"), taught(who, "weak"), step)
            words.append(in_words(f"{who.title}, strong minus weak teacher at step {step}", effect))
    return item.make([Table(["method", f"step {first}", f"step {last}"], rows)], words)


@_item(
    "own",
    "survival weights, every method at several learning rates",
    *(faster(variant, factor) for variant in (OPD, IW_OPD, SURVIVAL) for factor in RATES),
)
def _own(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, OPD)
    first, last = _steps(runs)[0], runs.steps
    words = [
        in_words(f"{SURVIVAL.title} minus {other.title} at step {step}, same learning rate", runs.effect(SURVIVAL, other, step))
        for step in (first, last)
        for other in (OPD, IW_OPD)
    ]

    def best(method: Variant, step: int) -> Variant:
        return runs.best((faster(method, factor) for factor in RATES), step)

    for step in (first, last):
        ours = best(SURVIVAL, step)
        for rival in (OPD, IW_OPD):
            theirs = best(rival, step)
            effect = runs.effect(ours, theirs, step)
            words.append(in_words(f"Each at its best learning rate for step {step}, {ours.title} minus {theirs.title}", effect))
    words.append(f"The best of {len(RATES)} learning rates is chosen on these very runs, for every method.")
    shown = [v.title for method in (OPD, IW_OPD, SURVIVAL) for v in (method, best(method, last))]
    return item.make([table], words, methods=numbers, shown=list(dict.fromkeys(shown)))


@_item(
    "objectives",
    "objectives under the same weights, each at several learning rates",
    *(faster(variant, rate) for rate in objectives.RATES for variant in OBJECTIVES),
    noise_of=(OPD, method("baseline"), KL, SURVIVAL, KL_SURVIVAL),
    seeds=1,
)
def _objectives(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    steps = _steps(runs)
    table, numbers = objectives.rates_table(runs, OBJECTIVES, steps)
    noise, ratios = objectives.noise_table(runs.noises(item.noise_of))
    words = objectives.registered(runs, steps) + objectives.at_their_best(runs, OBJECTIVES, steps[-1])
    return item.make([table, noise], words, accuracy=numbers, noise=ratios)


@_item(
    "divergences",
    "divergences, each at several learning rates",
    *(faster(variant, rate) for rate in objectives.RATES for variant in DIVERGENCES),
    seeds=1,
)
def _divergences(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    steps = _steps(runs)
    table, numbers = objectives.rates_table(runs, DIVERGENCES, steps)
    return item.make([table], objectives.at_their_best(runs, DIVERGENCES, steps[-1]), accuracy=numbers)


@_item("thresholds", "where answers stop", by_world=horizons.searched(), lineages=2, seeds=1)
def _thresholds(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = horizons.search_table(runs, _steps(runs))
    return item.make([table], ["A search on lineages that no test uses: it chooses the default threshold."], rows=numbers)


@_item("horizons", "answers that stop at drift", by_world=horizons.tested(), halved=horizons.halved(), seeds=1)
def _horizons(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = horizons.bars_table(runs, _steps(runs))
    return item.make([table], horizons.registered(runs), rows=numbers)


@_item("tokenizers", "a teacher with another tokenizer", *tokenizers.TESTED)
def _tokenizers(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    steps = _steps(runs)
    table, numbers = tokenizers.by_lineage_table(runs, steps)
    return item.make([table], tokenizers.registered(runs, steps[1:]), accuracy=numbers)


@_item(
    "rivals",
    "survival and its rivals",
    by_world={world: rivals.rivals(world) for world in rivals.FIXED_TOKENS},
    lineages=4,
    seeds=1,
)
def _rivals(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = rivals.rivals_table(runs, _steps(runs))
    shown = [variant.title for variant in rivals.drawn(runs.world)]
    return item.make([table], rivals.rivals_words(runs, _steps(runs)), methods=numbers, shown=shown)


@_item("gate", "the gate against the better of keeping and dropping", *rivals.GATE, rivals.GATED_STOPPED, lineages=4, seeds=1)
def _gate(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = rivals.gate_table(runs, _steps(runs))
    agreement = {variant.title: found for variant in rivals.GATE if (found := runs.agreement(variant))}
    return item.make([table], rivals.gate_words(runs, _steps(runs)), methods=numbers, agreement=agreement)


@_item(
    "rates",
    "survival and its rivals, each at several learning rates",
    by_world={
        world: [faster(variant, rate) for rate in objectives.RATES for variant in rivals.rivals(world)]
        for world in rivals.FIXED_TOKENS
    },
    lineages=4,
    seeds=1,
)
def _rates(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    steps, listed = _steps(runs), rivals.rivals(runs.world)
    table, numbers = objectives.rates_table(runs, listed, steps)
    words = [one for step in steps for one in objectives.at_their_best(runs, listed, step)]
    return item.make([table], words, accuracy=numbers)


@_item("updates", "several updates a batch", *rivals.UPDATES, lineages=4, seeds=1)
def _updates(item: Item, runs: Runs, probes: Probes) -> ItemSection:
    table, numbers = _comparison(runs, item.variants, rivals.UPDATES[0])
    words = [_at_the_end(runs, variant, rivals.UPDATES[0]) for variant in rivals.UPDATES[1:]]
    return item.make([table], words, methods=numbers)

"""`iwopd reproduce prediction`: does the probe, made before training, predict which method does best after it?

Everything is read from records in a folder of results: runs (`runs-<world>.jsonl`) and probes (`pair-probes.jsonl`). Pairs that
were trained but not probed are probed first; nothing is trained. `analysis.prediction` has the statistics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from iwopd import tiny
from iwopd.analysis.pair_probe import probe_pair
from iwopd.analysis.prediction import (
    FAMILIES,
    LEAST_PAIRS,
    SAMPLED,
    THRESHOLD,
    WHOLE,
    Chooser,
    Family,
    Pair,
    Place,
    Record,
    Regret,
    choosers,
    first_batches,
    gate_record,
    method_of,
    pairs_of,
    place_of,
    rank_agreement,
    regret,
    regrets,
    split_half,
)
from iwopd.analysis.probe.inputs import world_material
from iwopd.analysis.probe.result import Estimate
from iwopd.analysis.reproduce.tables import NOT_RUN, ItemSection, Table, markdown, print_section
from iwopd.config import make_config
from iwopd.errors import UserError
from iwopd.methods import TITLES
from iwopd.train.progress import pretraining_progress

PROBES = "pair-probes.jsonl"
BATCHES, PROMPTS = 4, 32
"""Of a probe: prompts as in `iwopd probe --world`, those of the evaluation, with their solutions."""
EARLY, LATE = 10, 40
"""Steps at which methods are ranked."""
TOO_FEW = "too few to tell"
ABOUT = "not in the paper: does a probe before training predict the ranking of methods after it?"
UNIT = "The unit of means and t intervals is the pair, a lineage in its world; seeds are averaged within it."

LOOKS = 4
FIRST_BATCH = (
    "have no probe: their agreement is that of the first batch of their own run under the reverse KL, before its first update."
)


class PredictionError(UserError, ValueError):
    """Results that cannot be read."""


# --- records ---------------------------------------------------------------------------------------------------------


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """The objects of JSONL files."""
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise PredictionError(f"{path}, line {number} is not JSON ({error}): remove it, or restore the file") from None
            if not isinstance(record, dict) or "world" not in record or "lineage" not in record:
                raise PredictionError(f"{path}, line {number} has no world and lineage: remove it, or restore the file")
            yield record


def read_runs(results: Path) -> list[Record]:
    return list(read_records(sorted(results.glob("runs-*.jsonl"))))


def read_probes(results: Path) -> list[Record]:
    """Those of pairs, and those of `iwopd probe` where they are recorded, too: they complete each other."""
    return list(read_records(path for path in (results / "probes.jsonl", results / PROBES) if path.is_file()))


def unprobed(runs: Iterable[Record], probes: Iterable[Record]) -> list[Place]:
    """Pairs that were trained and have no probe with both numbers."""
    trained = {place_of(run) for run in runs if method_of(run) is not None}
    known = {place_of(one) for one in probes if "cosines" in one and "agreement" in one}
    return sorted(trained - known)


def probe_world(world: str, lineage: int, models: str) -> dict[str, Any]:
    """The record of a pair, its cosines and agreement measured now. Other models than the runs' are refused."""
    with pretraining_progress() as progress:
        opened = tiny.open_world(tiny.world_recipe(world, lineage=lineage), progress=progress)
    if (here := json.dumps(opened.weights, sort_keys=True)) != models:
        what = (
            "do not name their models" if models == "null" else f"began from other models ({models}) than those here ({here})"
        )
        raise PredictionError(
            f"the runs of world {world}, lineage {lineage} {what}, so a probe made here says nothing of them: train them here "
            "into another folder (--results), or read what is recorded (--read-only)"
        )
    config = make_config({"threads": 1, "models": {"world": world, "lineage": lineage}})
    material = world_material(opened, BATCHES * PROMPTS)
    methods = [*SAMPLED, *WHOLE]
    found = probe_pair(config, batches=BATCHES, prompts=PROMPTS, methods=methods, material=material)
    place = {"key": f"{world}-{lineage}-{BATCHES * PROMPTS}", "world": world, "lineage": lineage}
    return {**place, **found.record, "models": opened.weights}


def reproduce_prediction(results: Path, console: Console, *, measure: bool = True) -> ItemSection:
    """Probe the pairs that lack one (if `measure`), each kept as soon as it is made; then read the section off the records."""
    runs, probes = read_runs(results), read_probes(results)
    for world, lineage, models in unprobed(runs, probes) if measure else ():
        console.print(f"probe: world {world}, lineage {lineage}", highlight=False)
        record = probe_world(world, lineage, models)
        with (results / PROBES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        probes.append(record)
    return prediction_section(runs, probes)


def prediction_alone(
    items: Sequence[str], results: Path, console: Console, target: Path | None = None, *, measure: bool = True
) -> ItemSection:
    """What the command does: print the section, and write it as Markdown to `target`. Without `measure` it only reads."""
    if len(items) > 1:
        others = ", ".join(one for one in items if one != "prediction")
        raise PredictionError(f"prediction reads the records of all worlds and goes alone: ask for {others} in another call")
    if not results.is_dir():
        raise PredictionError(f"there are no results in {results}: name their folder with --results")
    section = reproduce_prediction(results, console, measure=measure)
    print_section(section, console)
    if target is not None:
        target.write_text(markdown(section))
    return section


# --- tables ----------------------------------------------------------------------------------------------------------


def prediction_section(runs: Iterable[Record], probes: Iterable[Record]) -> ItemSection:
    """Rank correlations, regrets, and the choice on one half reported on the other, family by family."""
    runs, probes = list(runs), list(probes)
    probed = {place_of(one) for one in probes}
    seen = [one for one in first_batches(runs) if place_of(one) not in probed]
    pairs = pairs_of(runs, [*probes, *seen])
    tables: list[Table] = []
    worlds = ", ".join(dict.fromkeys(pair.world for pair in pairs))
    words = [f"{len(pairs)} pairs were trained, and looked at before{f' (worlds {worlds})' if pairs else ''}. {UNIT}"]
    if unseen := len({place_of(one) for one in seen}):
        words.append(f"{unseen} of them {FIRST_BATCH}")
    numbers: dict[str, Any] = {"pairs": len(pairs)}
    for family in FAMILIES:
        trained = [pair for pair in pairs if len(pair.reached(family, LATE)) > 1]
        if not trained:
            words.append(f"Methods of {family.words}: no pair has two of them at step {LATE}.")
            continue
        found = _family(trained, family)
        tables += found[0]
        words += found[1]
        if seen:
            words.append(_longer_look(runs, family))
        numbers[family.name] = found[2]
    return ItemSection("prediction", "a probe that predicts", ABOUT, tables, words, numbers)


def _family(pairs: Sequence[Pair], family: Family) -> tuple[list[Table], list[str], dict[str, Any]]:
    ranking, numbers = _ranking(pairs, family)
    words = [_gate_words(pairs, family)]
    ranked = any(pair.cosines for pair in pairs)
    if not ranked:
        words.append(f"Rank correlation, {family.words}: no pair has a probe with cosines.")
    first = [
        next(one for one in choosers() if (one.statistic, one.value) == wanted)
        for wanted in _WITHOUT_A_CHOICE
        if ranked or wanted[0] != "cosine"
    ]
    tables = [_pairs_table(pairs, family), *([ranking] if ranked else [])]
    for step in (EARLY, LATE):
        title = f"{family.words}, regret at step {step}, points: all pairs"
        tables.append(_table(title, [regrets(pairs, guide, family, step) for guide in first]))
    halves = split_half(pairs, family, LATE)
    if halves is None:
        words.append(f"Chosen on even lineages, reported on odd ones: {TOO_FEW}, a half takes {LEAST_PAIRS} pairs.")
        return tables, words, numbers
    tables.append(_table(f"{family.words}, regret at step {LATE}, points: odd lineages", [halves.reported]))
    tried = [[one.chooser.name, _shown(one.mean, ".1f")] for one in halves.tried]
    tables.append(Table([f"tried on even lineages, {family.words}", "regret"], tried))
    words.append(_halves_words(halves.chosen, halves.reported, family))
    reported = {one.chooser.name: _triple(one.mean) for one in halves.reported}
    return tables, words, {**numbers, "chosen": halves.chosen.name, "regret": reported}


_WITHOUT_A_CHOICE = (("cosine", 0.0), ("agreement", THRESHOLD))
"""Ways of choosing that nobody tuned: the largest cosine, and the gate's own threshold."""


def _longer_look(runs: Sequence[Record], family: Family) -> str:
    """Would more batches have been a better guide?"""
    guide = next(one for one in choosers() if (one.statistic, one.value) == ("agreement", THRESHOLD))
    found = regret(pairs_of(runs, first_batches(runs, LOOKS)), guide, family, LATE)
    return (
        f"By the mean of the first {LOOKS} batches of these runs ({family.words}; the student learns meanwhile), {guide.name} "
        f"loses {_shown(found.mean, '.1f')} at step {LATE}."
    )


def _pairs_table(pairs: Sequence[Pair], family: Family) -> Table:
    """What was known of every pair, and what became of it."""
    rows = []
    for pair in pairs:
        reached = pair.reached(family, LATE)
        known = "-" if pair.agreement is None else f"{pair.agreement:+.2f}"
        cells = (f"{reached[name]:.1f}" if name in reached else NOT_RUN for name in family.always)
        rows.append([f"{pair.world} {pair.lineage}", known, *cells])
    return Table([f"accuracy at step {LATE}", "agreement before", *(TITLES[name] for name in family.always)], rows)


def _ranking(pairs: Sequence[Pair], family: Family) -> tuple[Table, dict[str, Any]]:
    steps = {step: rank_agreement(pairs, family, step) for step in (EARLY, LATE)}
    worlds = list(dict.fromkeys(pair.world for pair in pairs))
    rows = [["all pairs", *(_shown(found.overall, "+.2f") for found in steps.values()), str(len(steps[LATE].by_pair))]]
    for world in worlds:
        cells = [_shown(found.by_world.get(world, Estimate(mean=None)), "+.2f") for found in steps.values()]
        rows.append([world, *cells, str(sum(one == world for one, _ in steps[LATE].by_pair))])
    columns = [f"rank correlation, {family.words}", *(f"step {step}" for step in steps), "pairs"]
    return Table(columns, rows), {"correlation": {step: _triple(found.overall) for step, found in steps.items()}}


def _gate_words(pairs: Sequence[Pair], family: Family) -> str:
    found = gate_record(pairs, family, LATE)
    what = f"{TITLES[family.survival]} against {TITLES[family.plain]}"
    if found.pairs < LEAST_PAIRS:
        return f"Agreement, {what}: {TOO_FEW} ({found.pairs} pairs)."
    return (
        f"Agreement, {what} at step {LATE}: below {THRESHOLD:g} or not, it names the better of the two in {found.right} of "
        f"{found.pairs} pairs; rank correlation with the gain of survival over pairs {found.correlation:+.2f}, no interval."
    )


def _table(title: str, listed: Sequence[Sequence[Regret]]) -> Table:
    """Each guide and what it loses, then the rivals, with each guide's regret minus theirs on the pairs that both have."""
    guides = [found[0] for found in listed]
    rows = [[*_lost(one), *[""] * len(guides)] for one in guides]
    for place, rival in enumerate(listed[0][1:], start=1):
        rows.append([*_lost(rival), *(_shown(found[place].difference, "+.1f") for found in listed)])
    return Table([title, "mean", "most", "pairs", *(f"{one.chooser.name}: minus this one's" for one in guides)], rows)


def _lost(one: Regret) -> list[str]:
    most = f"{max(one.by_pair.values()):.1f}" if one.by_pair else "-"
    return [one.chooser.name, _shown(one.mean, ".1f"), most, str(len(one.by_pair))]


def _halves_words(chosen: Chooser, reported: Sequence[Regret], family: Family) -> str:
    ours = reported[0]
    verdicts = []
    for rival in reported[1:]:
        difference = rival.difference
        if difference is None or difference.low is None or difference.high is None:
            verdicts.append(f"{rival.chooser.name}: {TOO_FEW}")
            continue
        better = "loses less" if difference.high < 0 else "loses more" if difference.low > 0 else "not told apart"
        verdicts.append(f"{rival.chooser.name}: {_shown(difference, '+.1f')}, {better}")
    return (
        f"Chosen on even lineages ({family.words}): {chosen.name}. On {len(ours.by_pair)} pairs with odd lineages it loses "
        f"{_shown(ours.mean, '.1f')} points against the best in hindsight; its regret minus that of "
        + "; ".join(verdicts)
        + "."
    )


def _shown(estimate: Estimate | None, form: str) -> str:
    """`0.5 (0.2 to 0.8)`; without an interval the mean alone."""
    if estimate is None or estimate.mean is None:
        return "-"
    mean = format(estimate.mean, form)
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} ({format(estimate.low, form)} to {format(estimate.high, form)})"


def _triple(estimate: Estimate) -> Mapping[str, float | None]:
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}

"""What `iwopd reproduce` does: models, runs, probes, sections."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from iwopd import tiny
from iwopd.analysis.gradient_noise import gradient_noise
from iwopd.analysis.probe.inputs import open_pair, world_material
from iwopd.analysis.probe.result import read_probe, write_probe
from iwopd.analysis.probe.run import run_probe
from iwopd.analysis.probe.settings import ProbeSettings
from iwopd.analysis.reproduce.horizons import halfway
from iwopd.analysis.reproduce.items import ITEMS, Item
from iwopd.analysis.reproduce.records import (
    Record,
    Records,
    check_models,
    collect,
    probe_key,
    probe_record,
    record_of,
    runs_file,
    told_apart,
)
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import ItemSection, markdown, print_section
from iwopd.analysis.reproduce.variants import Variant
from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.eval.statistics import LEAST_UNITS
from iwopd.stages import ConsoleStages
from iwopd.train.loading import planned_world
from iwopd.train.many import PlannedRun, run_all
from iwopd.train.progress import pretraining_progress

PROBE_PROMPTS = 256
USUAL = {"clean": (1e-4, 64), "drift": (2e-4, 32), "long": (2e-4, 16)}
"""Learning rate and prompts per step of a world."""
NOISE_BATCHES = 16
"""Batches of which gradient noise is measured."""


class ReproduceError(UserError, ValueError):
    """Options that make no sense."""


def reproduce(options: argparse.Namespace, console: Console) -> list[ItemSection]:
    """Make the runs that are missing, then print every item's section and write `results.json`."""
    items = _chosen(options.items)
    if options.collect:
        _collect(options.collect, options.results, console)
    if not items:
        return []
    runs = _known(_runs(options, items), items, console)
    if not runs.read_only:
        runs = _make_missing(runs, items, options, console)
        _measure_noise(runs, [variant for item in items for variant in item.noise_of], console)
    probed = any(item.needs_probe for item in items)
    probes = {lineage: found for lineage in runs.lineages if (found := _probe(runs, lineage))} if probed else {}
    sections = [item.section(runs, probes) for item in items]
    for section in sections:
        print_section(section, console)
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(_heading(runs) + "\n".join(markdown(section) for section in sections))
        console.print(f"tables: {options.markdown}", highlight=False)
    if not runs.read_only:
        runs.root.mkdir(parents=True, exist_ok=True)
        (runs.root / "results.json").write_text(json.dumps(as_record(sections), indent=1) + "\n")
    return sections


def as_record(sections: Sequence[ItemSection]) -> dict[str, Any]:
    """What `results.json` holds; a number that does not exist is null."""
    return {one.key: {"title": one.title, "words": list(one.words), "numbers": _plain(one.numbers)} for one in sections}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _collect(folders: Sequence[Path], results: Path, console: Console) -> None:
    """Record every finished run in these folders."""
    found = collect(folders)
    new = _record(found.records, results)
    known = len(found.records) - new
    console.print(
        f"{new} runs recorded in {results}, {known} known already, {len(found.unfinished)} unfinished", highlight=False
    )
    for path, why in found.others.items():
        console.print(f"not recorded: {path}: {why}", highlight=False, markup=False)


def _record(records: Sequence[Record], results: Path) -> int:
    """How many were new."""
    worlds = sorted({record["world"] for record in records})
    return sum(runs_file(results, world).add([one for one in records if one["world"] == world]) for world in worlds)


def _planned(runs: Runs, items: Sequence[Item], only: Sequence[str] = ()) -> list[PlannedRun]:
    """All runs of these items that are not in the records, or those of them with these titles."""
    whole = [variant for item in items for variant in item.trained(runs.world)]
    halved = [variant for item in items for variant in item.halved.get(runs.world, ())]
    if only:
        titles = list(dict.fromkeys(variant.title for variant in (*whole, *halved)))
        for title in only:
            if title not in titles:
                raise ReproduceError(f"--only: there is no {title!r} here; there are {'; '.join(titles)}")
        whole, halved = ([variant for variant in some if variant.title in only] for some in (whole, halved))
    planned = runs.all_planned(whole) + halfway(runs).all_planned(halved)
    return [run for run in planned if run.folder.name not in runs.records]


def _known(runs: Runs, items: Sequence[Item], console: Console) -> Runs:
    """With all that is recorded, and with the finished runs of these items that are in their folder."""
    assert runs.results is not None
    file = runs_file(runs.results, runs.world)
    known = replace(runs, records=file.read())
    there = [run for run in _planned(known, items) if run.finished]
    if not there:
        return known
    records = [record for run in there if (record := _record_of(run)) is not None]
    if runs.read_only:
        return replace(runs, records={**known.records, **{record["key"]: record for record in records}})
    console.print(f"{file.add(records)} finished runs in {runs.root} recorded in {file.path}", highlight=False)
    return replace(runs, records=file.read())


def _record_of(run: PlannedRun) -> Record | None:
    """Under the title of its variant."""
    member = f", lineage {run.config.models.lineage}, seed {run.config.seed}"
    return record_of(run.folder, run.title.removesuffix(member))


def _make_missing(runs: Runs, items: Sequence[Item], options: argparse.Namespace, console: Console) -> Runs:
    """Train what is not recorded; every run is recorded as soon as it is finished."""
    assert runs.results is not None
    file, planned = runs_file(runs.results, runs.world), _planned(runs, items, options.only)
    if not planned:
        return runs
    runs.root.mkdir(parents=True, exist_ok=True)
    _train_models([run.config for run in planned])
    check_models([*runs.records.values(), *map(_beginning, planned)], f"{file.path} and the models here")

    def keep(run: PlannedRun) -> None:
        if (record := _record_of(run)) is not None:
            file.add([record])

    run_all(planned, at_a_time=options.jobs, console=console, finished=keep)
    return replace(runs, records=file.read())


def _beginning(run: PlannedRun) -> Record:
    """What is known of a run before it is made."""
    config = run.config
    world = planned_world(config)
    assert world is not None  # the settings are those of a world
    place = {"world": config.models.world, "lineage": config.models.lineage, "seed": config.seed, "problems": 0}
    about = {"key": run.folder.name, "title": run.title, "settings": told_apart(config), "models": world.weights}
    return {**about, **place, "accuracy": {}}


def _chosen(names: Sequence[str]) -> list[Item]:
    paper = [key for key in ITEMS if key.startswith("p")]
    wanted = paper if "all" in names else list(dict.fromkeys(name.lower() for name in names))
    for name in wanted:
        if name not in ITEMS:
            raise ReproduceError(f"unknown item {name!r}; there are {', '.join(ITEMS)}, and all for p1 to p10")
    return [ITEMS[name] for name in wanted]


def _runs(options: argparse.Namespace, items: Sequence[Item]) -> Runs:
    for name in ("lineages", "seeds"):
        if getattr(options, name) is None:
            setattr(options, name, max(getattr(item, name) for item in items))
    for name in ("seeds", "lineages", "steps", "jobs", "problems"):
        if getattr(options, name) < 1:
            raise ReproduceError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.steps % 10 or options.steps < 20:
        raise ReproduceError(f"--steps must be a multiple of ten from 20 on (evaluations are every ten), got {options.steps}")
    if options.world not in tiny.WORLDS:
        raise ReproduceError(f"unknown world {options.world!r}; choose from {', '.join(tiny.WORLDS)}")
    lineages = range(options.first_lineage, options.first_lineage + options.lineages)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for name, usual in zip(("lr", "prompts_per_step"), USUAL[options.world], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, usual)
    same: Any = {name: getattr(options, name) for name in ("world", "steps", "lr", "prompts_per_step", "problems")}
    return Runs(options.out, lineages=lineages, seeds=seeds, results=options.results, read_only=options.read_only, **same)


def _train_models(configs: Sequence[Config]) -> None:
    """Pretrain every world that the runs need, before two of them wait for the same one."""
    sizes = ("student_size", "teacher_size", "teacher_tokenizer")
    wanted = {
        (str(one.models.world), one.models.lineage, tuple((name, getattr(one.models, name)) for name in sizes))
        for one in configs
    }
    with pretraining_progress() as progress:
        for world, lineage, models in sorted(wanted, key=repr):
            names: Any = {name.removesuffix("_size"): value for name, value in models if value is not None}
            tiny.open_world(tiny.world_recipe(world, lineage=lineage, **names), progress=progress)


def _measure_noise(runs: Runs, variants: Sequence[Variant], console: Console) -> None:
    """Gradient noise of the untrained students, recorded method by method."""
    for lineage in runs.lineages if variants else ():
        found = runs.noises_of(lineage)
        for variant in variants:
            if variant.title not in found:
                console.print(f"gradient noise: {variant.title}, lineage {lineage}", highlight=False)
                config = runs.config(variant, lineage, 0)
                _train_models([config])
                found[variant.title] = gradient_noise(config, NOISE_BATCHES)
            if runs.noise_records is not None:
                runs.noise_records.add([runs.noise_record(lineage, variant.title, found[variant.title])])


def _probe(runs: Runs, lineage: int) -> Record | None:
    """Of the untrained student: from the records, or from beside the runs, or made now."""
    assert runs.results is not None
    records, path = Records(runs.results / "probes.jsonl"), runs.root / f"probe-{runs.world}-{lineage}.json"
    known = records.read().get(probe_key(runs.world, lineage, PROBE_PROMPTS))
    if known is not None:
        return known
    if path.exists():
        probe = read_probe(path)
    elif runs.read_only:
        return None
    else:
        recipe = tiny.world_recipe(runs.world, lineage=lineage)
        with pretraining_progress() as pretraining:
            world = tiny.open_world(recipe, progress=pretraining)
        pair = open_pair(str(world.student), str(world.teacher), names=(f"{runs.world} student", "teacher"))
        with ConsoleStages() as progress:
            settings = ProbeSettings(max_tokens=world.max_response_tokens)
            probe = run_probe(pair, world_material(world, PROBE_PROMPTS), settings, progress)
        write_probe(probe, path)
    record = probe_record(probe, runs.world, lineage, PROBE_PROMPTS)
    if not runs.read_only:
        records.add([record])
    return record


def _heading(runs: Runs) -> str:
    return (
        f"World `{runs.world}`, lineages {list(runs.lineages)}, seeds {list(runs.seeds)}: {len(runs.members)} runs a row, "
        f"{runs.steps} steps of {runs.prompts_per_step} prompts at lr {runs.lr:g}, {runs.problems} evaluation problems. "
        "Accuracy in percent and differences in points: seeds are averaged within a lineage, means and 95 % t intervals are "
        f"over lineages (at least {LEAST_UNITS}), p-values are Holm's over all comparisons of a section.\n\n"
    )

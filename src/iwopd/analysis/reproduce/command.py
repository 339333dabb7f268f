"""What `iwopd reproduce` does: models, runs, probes, sections."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from iwopd import tiny
from iwopd.analysis.gradient_noise import gradient_noise
from iwopd.analysis.probe.inputs import open_pair, world_material
from iwopd.analysis.probe.result import Probe, read_probe, write_probe
from iwopd.analysis.probe.run import run_probe
from iwopd.analysis.probe.settings import ProbeSettings
from iwopd.analysis.reproduce.horizons import halfway
from iwopd.analysis.reproduce.items import ITEMS, Item
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import ItemSection, markdown, print_section
from iwopd.analysis.reproduce.variants import Variant
from iwopd.errors import UserError
from iwopd.stages import ConsoleStages
from iwopd.train.many import run_all
from iwopd.train.progress import pretraining_progress

PROBE_PROMPTS = 256
NOISE_BATCHES = 16
"""Batches of which gradient noise is measured."""


class ReproduceError(UserError, ValueError):
    """Options that make no sense."""


def reproduce(options: argparse.Namespace, console: Console) -> list[ItemSection]:
    """Make the runs that are missing, then print every item's section and write `results.json`."""
    items = _chosen(options.items)
    runs = _runs(options, items)
    variants = list({id(variant): variant for item in items for variant in item.trained(runs.world)}.values())
    probed = any(item.needs_probe for item in items)
    _train_models(runs, variants, need_pair=probed)
    halved = [variant for item in items for variant in item.halved.get(runs.world, ())]
    planned = runs.all_planned(variants) + halfway(runs).all_planned(halved)
    run_all(planned, at_a_time=options.jobs, console=console)
    _measure_noise(runs, [variant for item in items for variant in item.noise_of], console)
    probes = {lineage: _probe(runs, lineage) for lineage in runs.lineages} if probed else {}
    sections = [item.section(runs, probes) for item in items]
    for section in sections:
        print_section(section, console)
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(_heading(runs) + "\n".join(markdown(section) for section in sections))
        console.print(f"tables: {options.markdown}", highlight=False)
    (options.out / "results.json").write_text(json.dumps(as_record(sections), indent=1) + "\n")
    return sections


def as_record(sections: Sequence[ItemSection]) -> dict[str, Any]:
    """What `results.json` holds."""
    return {one.key: {"title": one.title, "words": list(one.words), "numbers": one.numbers} for one in sections}


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
    same: Any = {name: getattr(options, name) for name in ("world", "steps", "lr", "prompts_per_step", "problems")}
    return Runs(options.out, lineages=lineages, seeds=seeds, **same)


def _train_models(runs: Runs, variants: Sequence[Variant], *, need_pair: bool) -> None:
    """Pretrain every world that the runs need, before two of them wait for the same one."""
    wanted = {tuple(sorted(variant.models.items())) for variant in variants} | ({()} if need_pair else set())
    runs.root.mkdir(parents=True, exist_ok=True)
    with pretraining_progress() as progress:
        for lineage in runs.lineages:
            for sizes in sorted(wanted):
                names: Any = {name.removesuffix("_size"): value for name, value in sizes}
                tiny.open_world(tiny.world_recipe(runs.world, lineage=lineage, **names), progress=progress)


def _measure_noise(runs: Runs, variants: Sequence[Variant], console: Console) -> None:
    """Gradient noise of the untrained students, kept beside the runs method by method."""
    for lineage in runs.lineages if variants else ():
        path = runs.noise_file(lineage)
        found = json.loads(path.read_text()) if path.exists() else {}
        for variant in variants:
            if variant.title not in found:
                console.print(f"gradient noise: {variant.title}, lineage {lineage}", highlight=False)
                found[variant.title] = list(gradient_noise(runs.config(variant, lineage, 0), NOISE_BATCHES))
                path.write_text(json.dumps(found, indent=1) + "\n")


def _probe(runs: Runs, lineage: int) -> Probe:
    """Of the untrained student, kept beside the runs."""
    path = runs.root / f"probe-{runs.world}-{lineage}.json"
    if path.exists():
        return read_probe(path)
    world = tiny.open_world(tiny.world_recipe(runs.world, lineage=lineage))
    pair = open_pair(str(world.student), str(world.teacher), names=(f"{runs.world} student", "teacher"))
    with ConsoleStages() as progress:
        settings = ProbeSettings(max_tokens=world.max_response_tokens)
        probe = run_probe(pair, world_material(world, PROBE_PROMPTS), settings, progress)
    write_probe(probe, path)
    return probe


def _heading(runs: Runs) -> str:
    return (
        f"World `{runs.world}`, lineages {list(runs.lineages)}, seeds {list(runs.seeds)}: {len(runs.members)} runs a row, "
        f"{runs.steps} steps of {runs.prompts_per_step} prompts at lr {runs.lr:g}, {runs.problems} evaluation problems. "
        "Accuracy in percent and differences in points, with 95 % intervals over runs and problems; differences are paired by "
        "lineage, seed and problem.\n\n"
    )

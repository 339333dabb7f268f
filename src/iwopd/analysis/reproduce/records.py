"""Raw results as small JSONL files: what the tables are printed from, without run directories.

    run directory --record_of--> one line of runs-<world>.jsonl
    probe         --probe_record--> one line of probes.jsonl

Every line is an object with a `key`; lines are sorted, so that equal contents are equal files. Writers lock the folder, merge,
and replace the file as a whole: several processes may record at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iwopd
from iwopd.analysis.probe.result import Alignment, Estimate, Probe
from iwopd.config import Config, flatten, make_config, without
from iwopd.errors import UserError
from iwopd.filesystem import locked, make_directory, write_atomic
from iwopd.methods import method_title
from iwopd.runs.identity import run_key
from iwopd.runs.logs import json_lines
from iwopd.runs.reading import Run

Record = dict[str, Any]
ASIDE = ("title", "seconds", "iwopd", "models")
"""Fields in which two records of one run may differ: who planned it, on which machine, with which version. `models` names the
weights of student and teacher, and older records do not have it: `check_models` compares what there is."""
ORDER = ("world", "title", "lineage", "seed", "key")
"""By which lines are sorted."""
LAPS = ("rollout", "teacher", "signal", "update")


class RecordError(UserError, ValueError):
    """A file of results that cannot be used, and where."""


@dataclass(frozen=True)
class Records:
    """One JSONL file."""

    path: Path

    def read(self) -> dict[str, Record]:
        """By key; a file that is not there has none. Damage, and two outcomes of one run, are refused."""
        found: dict[str, Record] = {}
        places: dict[str, int] = {}
        for number, record, _ in json_lines(self.path) if self.path.is_file() else ():
            if record is None or not isinstance(record.get("key"), str):
                remedy = "restore the file, or remove the line: its run is then made again"
                raise RecordError(f"{self.path}, line {number} is damaged: it is not a JSON object with a key; {remedy}")
            key = record["key"]
            if key in found and outcome(found[key]) != outcome(record):
                where = f"lines {places[key]} and {number} of {self.path}"
                raise RecordError(_disagree(where, found[key], record))
            if key not in found:
                found[key], places[key] = record, number
        check_models(found.values(), str(self.path))
        return found

    def add(self, new: Iterable[Record]) -> int:
        """Merge records into the file; how many it did not have. One that it has with another outcome is refused."""
        make_directory(self.path.parent)
        with locked(self.path.parent):
            found = self.read()
            before = len(found)
            for record in new:
                kept = found.setdefault(record["key"], record)
                if outcome(kept) != outcome(record):
                    raise RecordError(_disagree(f"{self.path} and a new result", kept, record))
            check_models(found.values(), f"{self.path} with new results")
            if len(found) > before:
                lines = (json.dumps(one, ensure_ascii=False) + "\n" for one in sorted(found.values(), key=_order))
                write_atomic(self.path, "".join(lines))
        return len(found) - before


def outcome(record: Mapping[str, Any]) -> Record:
    """What two records of one run must agree in."""
    return {name: value for name, value in record.items() if name not in ASIDE}


def check_models(records: Iterable[Record], where: str) -> None:
    """Refuse runs of one lineage that began from different models: what differs between them is not the method.

    Models are told apart by their weights where records name them, else by what they did before the first update: the student's
    accuracy, and the distance of both on the first rollouts.
    """
    seen: dict[str, tuple[str, Record]] = {}
    for record in records:
        for what, place, value in _beginnings(record):
            known, first = seen.setdefault(place, (value, record))
            if known != value:
                raise RecordError(
                    f"{where}: {record['world']} lineage {record['lineage']} began from different models: {what} {known} "
                    f"({first.get('title')}, {first['key']}) and {value} ({record.get('title')}, {record['key']}). Another "
                    "kind of processor or torch trains other weights from one seed: keep their results in different folders "
                    "(--results), and compare within a folder"
                )


def _beginnings(record: Record) -> Iterator[tuple[str, str, str]]:
    """What is compared (in words), among which records (as a key), and its value."""
    settings = record.get("settings")
    if settings is None:
        return
    whose = {name: value for name, value in settings.items() if name.startswith("models.")}
    shared = {name: value for name, value in settings.items() if not name.startswith(("method.", "optim."))}
    lineage = (record["world"], record["lineage"])
    for model, digest in (record.get("models") or {}).items():
        kind = [value for name, value in whose.items() if name.startswith(f"models.{model}")]
        yield f"{model} weights", repr((model, *lineage, kind)), digest
    members = (*lineage, record["seed"], record["problems"])
    student = [value for name, value in whose.items() if name.startswith("models.student")]
    evaluated = [(name, value) for name, value in settings.items() if name.startswith("eval.")]
    if (base := record["accuracy"].get("0")) is not None:
        yield "untrained accuracy", repr(("base", *members, student, evaluated)), f"{base:g} %"
    if record.get("kl"):
        yield "KL of the first step", repr(("kl", *members, sorted(shared.items()))), f"{record['kl'][0]}"


def runs_file(folder: Path, world: str) -> Records:
    return Records(folder / f"runs-{world}.jsonl")


def _order(record: Record) -> tuple[tuple[int, Any], ...]:
    """Numbers before words, and what is missing first."""
    values = (record.get(name) for name in ORDER)
    return tuple((0, 0) if one is None else (1, one) if isinstance(one, int) else (2, str(one)) for one in values)


def _disagree(where: str, one: Record, other: Record) -> str:
    names = [name for name in {**one, **other} if name not in ASIDE and one.get(name) != other.get(name)]
    listed = "; ".join(f"{name} {_short(one.get(name))} and {_short(other.get(name))}" for name in names)
    return f"{where} disagree about the run {one['key']} ({one.get('title')}): {listed}. Keep one of them"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# --- runs ------------------------------------------------------------------------------------------------------------


def is_finished(folder: Path, config: Config) -> bool:
    """Whether the last step of a run directory is done and evaluated."""
    run = Run(folder)
    if not (folder / "run.json").is_file():
        return False
    evaluated = max((record["step"] for record in run.log("evals.jsonl")), default=-1)
    return min(run.step, evaluated) >= config.steps


def record_of(folder: Path, title: str | None = None) -> Record | None:
    """What is kept of a run directory on an embedded world; None if the run is not finished (or not evaluated)."""
    run = Run(folder)
    config = make_config(run.config)
    if config.models.world is None:
        raise RecordError(f"{folder} is no run on an embedded world: only these are recorded")
    if not is_finished(folder, config):
        return None
    means: dict[int, list[float]] = {}
    for one in run.evals:
        means.setdefault(one.step or 0, []).append(float(one.scores.double().mean()))
    written, total = {0: 0.0}, 0.0
    for record in run.metrics:
        total += record["rollouts"] * record["rollout/length_mean"]
        written[record["step"]] = total
    return {
        "key": run_key(config),
        "world": config.models.world,
        "lineage": config.models.lineage,
        "seed": config.seed,
        "steps": config.steps,
        "title": title or config_title(config),
        "settings": told_apart(config),
        "problems": len(run.evals[-1].problem_ids),
        "accuracy": {str(step): round(100.0 * sum(found) / len(found), 3) for step, found in sorted(means.items())},
        "tokens": {str(step): round(written[step]) for step in sorted(means) if step},
        "seconds": {name: round(sum(one.get(f"time/{name}") or 0.0 for one in run.metrics), 2) for name in LAPS},
        "kl": [_digits(one.get("kl/sampled")) for one in run.metrics],
        "agreement": [_digits(one.get("gradient/agreement")) for one in run.metrics],
        "iwopd": str(run.about.get("iwopd", iwopd.__version__)),
        **({"models": run.about["models"]} if "models" in run.about else {}),
    }


def told_apart(config: Config) -> Record:
    """The dotted settings that make a method: not the defaults, not where things are, not what repeats change."""
    tree = without(config.model_dump(mode="json", exclude_none=True, exclude_defaults=True), "place", "repeat")
    names = ("models.world", "models.lineage")
    return {name: value for name, value in sorted(flatten(tree)) if name not in names}


def config_title(config: Config) -> str:
    """A name for a run that nobody named: its method, and what else is not the default."""
    others = {name: value for name, value in told_apart(config).items() if not name.startswith("method.")}
    return ", ".join([method_title(config.model_dump()["method"]), *(f"{name} {value}" for name, value in others.items())])


def _digits(value: Any, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class Collected:
    """What a search for run directories found."""

    records: Sequence[Record]
    unfinished: Sequence[Path]
    others: Mapping[Path, str]
    """Folders that cannot be recorded, and why."""


def collect(folders: Iterable[Path], titles: Mapping[str, str] | None = None, skip: Iterable[str] = ()) -> Collected:
    """Every finished run in these folders (or that they are); `titles` by key, `skip` names folders that are known already."""
    records, unfinished, others = [], [], {}
    known = set(skip)
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"{folder} is not a folder: give run directories, or folders that hold some")
        inside = [folder] if (folder / "run.json").is_file() else sorted(one.parent for one in folder.glob("*/run.json"))
        for place in inside:
            if place.name in known:
                continue
            try:
                record = record_of(place)
            except UserError as error:
                others[place] = str(error)
                continue
            if record is None:
                unfinished.append(place)
            else:
                records.append({**record, "title": (titles or {}).get(record["key"], record["title"])})
    return Collected(records, unfinished, others)


# --- probes ----------------------------------------------------------------------------------------------------------


def probe_record(probe: Probe, world: str, lineage: int, prompts: int) -> Record:
    """The numbers of a probe that tables print."""
    found: Record = {"key": probe_key(world, lineage, prompts), "world": world, "lineage": lineage, "prompts": prompts}
    if probe.handoff is not None and probe.handoff.student is not None:
        handoff = probe.handoff
        found["handoff"] = {
            "fractions": handoff.fractions,
            "teacher": [_digits(mean) for mean in handoff.teacher.mean],
            "student": _digits(probe.handoff.student.mean),
            "fall": _three(handoff.fall),
        }
    if probe.likelihood is not None:
        parts = ("student", "teacher", "difference")
        found["likelihood"] = {name: _three(getattr(probe.likelihood, name)) for name in parts}
    if probe.alignment is not None:
        found["alignment"] = _alignment(probe.alignment)
    return {**found, "iwopd": probe.iwopd}


def probe_key(world: str, lineage: int, prompts: int) -> str:
    return f"{world}-{lineage}-{prompts}"


def _alignment(alignment: Alignment) -> Record:
    return {part: {one.key: _three(one.cosine) for one in getattr(alignment, part)} for part in ("rules", "regions")}


def _three(one: Estimate) -> list[float | None]:
    """Mean, low, high."""
    return [_digits(value) for value in (one.mean, one.low, one.high)]

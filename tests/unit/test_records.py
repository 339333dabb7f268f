"""Raw results: what is kept of a run, files that are merged safely, tables without run directories."""

from __future__ import annotations

import json
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iwopd.analysis.reproduce.items import ITEMS
from iwopd.analysis.reproduce.records import RecordError, Records, collect, config_title, record_of
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.variants import IW_OPD, OPD, Variant, faster
from iwopd.cli import main
from iwopd.config import config_toml, make_config
from iwopd.runs.directory import RunDirectory
from iwopd.runs.identity import run_key

PROBLEMS, UNTRAINED = 8, 2


def write_run(runs: Runs, variant: Variant, right: int) -> None:
    for lineage, seed in runs.members:
        job = runs.planned(variant, lineage, seed)
        run = RunDirectory(job.folder)
        run.create(job.config, "data")
        for step in range(1, runs.steps + 1):
            laps = {"time/rollout": 0.5, "time/teacher": 0.25, "time/signal": 0.0, "time/update": 1.0, "time/step": 1.75}
            written = {"rollouts": 64, "rollout/length_mean": 10.5}
            run.append("metrics.jsonl", {"step": step, "kl/sampled": 1.23456 / step, **laps, **written})
        for step in range(0, runs.steps + 1, 10):
            scores = [[float(place < (right if step else UNTRAINED))] for place in range(PROBLEMS)]
            ids = [str(place) for place in range(PROBLEMS)]
            run.append("evals.jsonl", {"step": step, "task": "tiny", "mean": 0.0, "problem_ids": ids, "scores": scores})


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "out", lineages=(0, 1), seeds=(3,), steps=20, problems=PROBLEMS)


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *map(str, words)])
    return int(ended.value.code or 0)


def test_what_is_kept_of_a_run(runs: Runs) -> None:
    write_run(runs, faster(IW_OPD, 2.0), 3)
    job = runs.planned(faster(IW_OPD, 2.0), 1, 3)
    record = record_of(job.folder)
    assert record is not None
    assert record.pop("agreement") == [None] * 20
    assert record.pop("kl") == [float(f"{1.23456 / step:.4g}") for step in range(1, 21)]
    assert record.pop("iwopd")
    assert record == {
        "key": job.folder.name,
        "world": "clean",
        "lineage": 1,
        "seed": 3,
        "steps": 20,
        "title": "IW-OPD, optim.lr 0.0002",
        "settings": record["settings"],
        "problems": PROBLEMS,
        "accuracy": {"0": 25.0, "10": 37.5, "20": 37.5},
        "tokens": {"10": 6720, "20": 13440},
        "seconds": {"rollout": 10.0, "teacher": 5.0, "signal": 0.0, "update": 20.0},
    }
    assert record["settings"]["optim.lr"] == 0.0002
    assert not {"seed", "steps", "threads", "eval.every"} & set(record["settings"])
    log = job.folder / "evals.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert record_of(job.folder) is None  # the last evaluation is missing


def test_the_key_of_a_saved_run_is_the_planned_one(runs: Runs) -> None:
    """So that folders of any sweep are found again: for every variant of the catalogue."""
    for world in ("clean", "drift"):
        place = replace(runs, world=world)
        variants = {repr(one): one for item in ITEMS.values() for one in (*item.trained(world), *item.halved.get(world, ()))}
        for variant in variants.values():
            config = place.config(variant, 1, 3)
            assert run_key(make_config(tomllib.loads(config_toml(config)))) == run_key(config), variant.title


def test_a_config_has_a_title(runs: Runs) -> None:
    assert config_title(runs.config(OPD, 0, 0)) == config_title(runs.config(OPD, 5, 7))
    assert config_title(runs.config(faster(OPD, 2.0), 0, 0)) != config_title(runs.config(OPD, 0, 0))


def test_files_are_merged_sorted_and_whole(tmp_path: Path) -> None:
    file = Records(tmp_path / "results" / "runs-clean.jsonl")
    assert file.read() == {}
    some = [{"key": f"k{place}", "lineage": place % 7, "accuracy": {"0": 1.0}} for place in range(40)]
    with ThreadPoolExecutor(8) as pool:  # every writer reads, merges and replaces under a lock
        assert sum(pool.map(lambda one: file.add([one]), some)) == 40
    text = file.path.read_text()
    assert len(file.read()) == 40
    other = Records(tmp_path / "other.jsonl")
    other.add(some[::-1])
    assert other.path.read_text() == text
    assert file.add([{**some[0], "seconds": {"rollout": 9.0}, "title": "mine"}]) == 0  # another machine, the same outcome
    assert file.path.read_text() == text


def test_damage_and_contradictions_are_refused(tmp_path: Path) -> None:
    file = Records(tmp_path / "runs-clean.jsonl")
    one, other = {"key": "a", "title": "OPD", "accuracy": {"0": 1.0}}, {"key": "a", "title": "OPD", "accuracy": {"0": 2.0}}
    file.add([one])
    with pytest.raises(RecordError, match=r'disagree about the run a \(OPD\): accuracy \{"0": 1.0\} and \{"0": 2.0\}'):
        file.add([other])
    assert file.read() == {"a": one}
    file.path.write_text(json.dumps(one) + "\n" + json.dumps(one) + "\n")
    assert len(file.read()) == 1
    file.path.write_text(json.dumps(one) + "\n\n" + json.dumps(other) + "\n")
    with pytest.raises(RecordError, match=r"runs-clean.jsonl, line 2 is damaged"):
        file.read()
    file.path.write_text(json.dumps(one) + "\n" + json.dumps(other) + "\n")
    with pytest.raises(RecordError, match=r"lines 1 and 2 of .*runs-clean.jsonl disagree about the run a"):
        file.read()
    file.path.write_text(json.dumps(one) + '\n{"key": "b", "accu')
    with pytest.raises(RecordError, match="line 2 is damaged"):
        file.read()


def begun(title: str, lineage: int = 0, **more: Any) -> dict[str, Any]:
    same = {"world": "clean", "lineage": lineage, "seed": 0, "problems": 500, "settings": {"method.weights": title}}
    return {"key": f"{title}-{lineage}", "title": title, **same, "accuracy": {"0": 25.0, "40": 60.0}, "kl": [1.9, 1.8], **more}


DIGESTS = {"student": "aa", "teacher": "bb"}


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({"models": DIGESTS}, {"models": {**DIGESTS, "teacher": "cc"}}, "teacher weights bb .* and cc"),
        ({"models": DIGESTS}, {"models": {**DIGESTS, "student": "cc"}}, "student weights aa .* and cc"),
        ({"models": DIGESTS}, {"accuracy": {"0": 25.2, "40": 60.0}}, "untrained accuracy 25 % .* and 25.2 %"),
        ({}, {"kl": [1.91, 1.8]}, "KL of the first step 1.9 .* and 1.91"),
        ({}, {"settings": {"optim.lr": 1.0}, "kl": [1.91, 1.8]}, "KL of the first step"),
    ],
)
def test_results_of_other_models_are_not_mixed(one: Any, other: Any, why: str, tmp_path: Path) -> None:
    file = Records(tmp_path / "runs-clean.jsonl")
    file.add([begun("OPD", **one)])
    with pytest.raises(RecordError, match=rf"clean lineage 0 began from different models: {why}.*--results"):
        file.add([begun("Survival", **other)])
    assert list(file.read()) == ["OPD-0"]
    lines = [begun("OPD", **one), begun("Survival", **other)]
    file.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordError, match="began from different models"):
        file.read()


SAME: list[dict[str, Any]] = [
    {"models": DIGESTS},
    {"lineage": 1, "accuracy": {"0": 3.0}, "kl": [9.0]},
    {"settings": {"rollout.horizon.type": "fixed"}, "kl": [9.0]},
    {"settings": {"models.teacher_size": "weak"}, "kl": [9.0], "models": {**DIGESTS, "teacher": "cc"}},
    {
        "settings": {"models.student_size": "small"},
        "accuracy": {"0": 3.0},
        "kl": [9.0],
        "models": {**DIGESTS, "student": "c"},
    },
    {"seed": 1, "accuracy": {"0": 24.8}, "kl": [9.0]},
]


@pytest.mark.parametrize("other", SAME)
def test_results_of_the_same_models_are(other: Any, tmp_path: Path) -> None:
    file = Records(tmp_path / "runs-clean.jsonl")
    assert file.add([begun("OPD", models=DIGESTS), begun("Survival", **other)]) == 2


def test_folders_are_collected_and_tables_need_none(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs, OPD, 3)
    write_run(replace(runs, lineages=(0,)), IW_OPD, 4)
    begun = runs.planned(IW_OPD, 1, 3)
    RunDirectory(begun.folder).create(begun.config, "data")
    results = tmp_path / "results"
    assert call("--collect", runs.root, "--results", results) == 0
    assert "3 runs recorded" in capsys.readouterr().out
    assert call("--collect", runs.root, "--results", results) == 0
    printed = capsys.readouterr().out
    assert "0 runs recorded" in printed
    assert "3 known already, 1 unfinished" in " ".join(printed.split())
    shutil.rmtree(runs.root)
    design = ["--lineages", 2, "--seeds", 1, "--first-seed", 3, "--steps", 20, "--problems", PROBLEMS]
    elsewhere = tmp_path / "elsewhere"
    assert call("p3", *design, "--results", results, "--out", elsewhere, "--read-only", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["p3"]
    assert found["words"][0] == "IW-OPD minus OPD at step 10: +12.5 points over 1 lineage: too few to tell, a verdict takes 4."
    gone = "Not run: IW-OPD (lineage 1 seed 3); OPD, lr x 1.25; IW-OPD, weights of mean one."
    assert found["words"][-1] == gone
    assert len(found["words"]) == 3  # nothing is said about what was not run
    assert found["numbers"]["methods"]["OPD, lr x 1.25"]["accuracy"]["20"] == [None] * 3
    assert not elsewhere.exists()


def test_only_what_is_missing_is_made_and_recorded_at_once(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, made = tmp_path / "results", []
    write_run(runs, OPD, 3)
    call("--collect", runs.root, "--results", results)
    shutil.rmtree(runs.root)

    class Process:
        returncode = 0

        def poll(self) -> int:
            return 0

        def kill(self) -> None: ...

        def wait(self) -> None: ...

    def start(run: Any) -> Process:
        recorded = len((results / "runs-clean.jsonl").read_text().splitlines())
        made.append((run.title, recorded))
        write_run(replace(runs, lineages=(run.config.models.lineage,)), IW_OPD, 5)
        return Process()

    opened: list[Any] = []
    monkeypatch.setattr("iwopd.tiny.open_world", lambda recipe, **_: opened.append(recipe))
    monkeypatch.setattr("iwopd.tiny.World.weights", DIGESTS)
    monkeypatch.setattr("iwopd.train.many._start", start)
    design = ["--lineages", 2, "--seeds", 1, "--first-seed", 3, "--steps", 20, "--problems", PROBLEMS, "--jobs", 1]
    assert call("p5", *design, "--results", results, "--out", runs.root) == 0
    assert made == [("IW-OPD, lineage 0, seed 3", 2), ("IW-OPD, lineage 1, seed 3", 3)]
    assert len(opened) == 2
    records = Records(results / "runs-clean.jsonl").read()
    assert sorted(one["title"] for one in records.values()) == ["IW-OPD"] * 2 + [config_title(runs.config(OPD, 0, 0))] * 2
    assert call("p5", *design, "--results", results, "--out", tmp_path / "new") == 0
    assert len(made) == 2  # a fresh clone trains nothing
    assert len(opened) == 2
    file = Records(tmp_path / "other" / "runs-clean.jsonl")
    file.add([{**one, "models": {**DIGESTS, "teacher": "cc"}} for one in records.values() if one["title"] != "IW-OPD"])
    assert call("p5", *design, "--results", file.path.parent, "--out", tmp_path / "new") == 2
    assert "and the models here: clean lineage 0 began from different models: teacher weights cc" in capsys.readouterr().err
    assert len(made) == 2  # refused before anything is trained


def test_folders_that_are_no_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecordError, match="nowhere is not a folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert "config.toml is missing" in next(iter(collect([tmp_path]).others.values()))
    assert call() != 0
    assert "nothing to do" in capsys.readouterr().err


def test_probes_are_read_from_their_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handoff = {"fractions": [0.0, 0.9], "teacher": [0.99, 0.4], "student": 0.35, "fall": [0.59, 0.5, 0.68]}
    place = {"world": "clean", "prompts": 256, "handoff": handoff}
    Records(tmp_path / "probes.jsonl").add([{"key": f"clean-{one}-256", "lineage": one, **place} for one in range(4)])
    assert call("p2", "--results", tmp_path, "--out", tmp_path / "out", "--read-only", "--lineages", 5, "--json") == 0
    words = json.loads(capsys.readouterr().out.splitlines()[-1])["p2"]["words"]
    assert "lineage by lineage (intervals over prompts): 59 (50 to 68); 59 (50 to 68)" in words[0]
    assert "points over 4 lineages (p < 0.001): established." in words[1]
    assert words[2] == "Not run: probes of lineages 4."

"""One reader of run directories, and one notion of which settings make a run another run or another method."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from browser.report_runs import make_run
from iwopd.analysis.compare import compare
from iwopd.config import Config, ConfigError, defaults, flatten, load_config, make_config, marked, settings, without
from iwopd.methods import method_title
from iwopd.report.gathering import gather
from iwopd.runs.directory import RunDirectory
from iwopd.runs.identity import method_settings, run_key
from iwopd.runs.logs import Notes, RunError
from iwopd.runs.reading import Run, read_runs
from iwopd.runs.results import load
from iwopd.train.card import model_card

OTHERS = {"math": {"urls": ["http://a:1"], "name": "m"}}


def config(**change: Any) -> Config:
    return make_config({"models": {"world": "clean"}, **change})


# --- marks ------------------------------------------------------------------------------------------------------------


def test_marks_are_found_in_nested_sections_and_tables() -> None:
    names = marked("place")
    assert {"tracking", "checkpoint", "cluster", "eval.kept_rollouts", "rollout.overlap", "teacher.urls"} <= set(names)
    assert "teacher.others.*.urls" in names
    assert set(marked("repeat")) == {"seed", "steps", "threads", "optim.token_budget", "eval"}
    known = {name for name, _ in settings()} | {"tracking", "checkpoint", "cluster", "eval"}
    assert all(name in known for name in marked("place", "repeat") if "*" not in name)


def test_a_tree_is_left_without_marked_settings() -> None:
    tree = {"teacher": {"urls": ["x"], "name": "t", "others": OTHERS}, "tracking": {"console": "off"}, "old": {"name": 1}}
    assert without(tree, "place") == {"teacher": {"name": "t", "others": {"math": {"name": "m"}}}, "old": {"name": 1}}
    assert without({"tracking": 3, "teacher": [1], "eval": {}}, "place") == {"teacher": [1], "eval": {}}
    assert dict(flatten(defaults()))["optim.lr"] == 1e-5


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"teacher": {"others": {"math": {"urls": ["http://elsewhere:2"], "name": "m", "patience": 9.0}}}},
        {"teacher": {"others": OTHERS, "urls": ["http://b:1"]}, "tracking": {"project": "p"}, "checkpoint": {"keep": 9}},
        {"teacher": {"others": OTHERS}, "eval": {"kept_rollouts": 0}, "rollout": {"overlap": True}, "steps": 50},
    ],
)
def test_a_resumed_run_may_change_where_things_are(tmp_path: Path, change: dict[str, Any]) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(config(teacher={"others": OTHERS}), "data")
    run.check_resume(config(**change), "data", allow_changes=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"optim": {"token_budget": 9}}, "optim.token_budget: 8192 -> 9"),
        ({"eval": {"samples": 2}}, "eval.samples: 1 -> 2"),
        ({"teacher": {"others": {"math": {"urls": ["http://a:1"], "name": "other"}}}}, "teacher.others: "),
        ({"steps": 50, "method": {"weights": "curriculum"}}, "steps: 40 -> 50"),
    ],
)
def test_a_resumed_run_may_not_become_another_run(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    run = RunDirectory(tmp_path / "run")
    method = change.get("method", {})
    run.create(config(teacher={"others": OTHERS}, method=method), "data")
    with pytest.raises(RunError, match=named):
        run.check_resume(config(**{"teacher": {"others": OTHERS}, **change}), "data", allow_changes=False)


# --- the same method --------------------------------------------------------------------------------------------------


def write_run(folder: Path, tree: dict[str, Any], seed: int) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps({"models": {"world": "clean"}, "seed": seed, "method": {}, **tree}))
    (folder / "run.json").write_text('{"format": 1, "data": "x"}')
    record = {"step": 10, "task": "t", "problem_ids": ["a", "b"], "scores": [[1], [0]]}
    (folder / "evals.jsonl").write_text(json.dumps(record) + "\n")
    return folder


@pytest.mark.parametrize(
    "tree",
    [
        {"teacher": {"urls": ["http://b:1"], "patience": 3.0}},
        {"cluster": {"nodes": 2}, "optim": {"token_budget": 1}, "threads": 2, "eval": {"kept_rollouts": 1}},
        {"rollout": {"top_p": 1.0}},  # its default: an earlier version may not have known it
    ],
)
def test_runs_of_one_method_are_repeats_for_comparison_and_report(tmp_path: Path, tree: dict[str, Any]) -> None:
    folders = [write_run(tmp_path / "a", {}, 0), write_run(tmp_path / "b", tree, 1)]
    other = write_run(tmp_path / "c", {"method": {"weights": "cumulative-share"}}, 0)
    found = compare([(None, load(folder)) for folder in (*folders, other)])
    assert [(group.name, len(group.members)) for group in found.groups] == [("OPD", 2), ("IW-OPD", 1)]
    data = gather(read_runs([*folders, other], Notes()), Notes(), None, 0)
    assert [(group.label, len(group.runs)) for group in data.groups] == [("OPD", 2), ("IW-OPD", 1)]


def test_another_clip_is_another_method(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), {"method": {"clip": clip}}, seed) for seed, clip in enumerate((0.2, 0.3))]
    data = gather(read_runs(folders, Notes()), Notes(), None, 0)
    assert [group.label for group in data.groups] == ["OPD (method.clip 0.2)", "OPD (method.clip 0.3)"]
    assert method_settings(Run(folders[1]).config)["method.clip"] == 0.3


def test_settings_of_another_version_are_read(tmp_path: Path) -> None:
    old = {"method": {"weights": "cumulative-share", "params": {"gamma": 0.5}, "forgotten": 1}, "engine": {"gone": True}}
    found = load(write_run(tmp_path / "a", old, 3))
    assert (found.method, found.seed, found.recipe["engine.gone"]) == ("IW-OPD", 3, True)
    notes = Notes()
    (run,) = read_runs([tmp_path / "a"], notes)
    assert run.seed == 3


def test_parameters_that_are_left_out_are_the_rules_own() -> None:
    assert method_title({"weights": "cumulative-share"}) == "IW-OPD"
    assert method_title({"advantage": "exopd"}) == "ExOPD"
    assert method_title({"advantage": "exopd", "scale": 2.0}) == "exopd uniform scale=2.0"
    assert method_title({"weights": "somebody's", "params": {"x": 1}}) == "opd somebody's x=1"


def test_the_key_of_a_run_is_its_outcome() -> None:
    one = run_key(config())
    assert run_key(config(tracking={"project": "x"}, checkpoint={"keep": 5}, cluster={"nodes": 3})) == one
    assert len({one, run_key(config(seed=1)), run_key(config(steps=3)), run_key(config(optim={"lr": 1.0}))}) == 4


def test_the_model_card_leaves_out_where_things_were(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    chosen = config(method={"weights": "cumulative-share"}, rollout={"overlap": True})
    run.create(chosen, "data")
    card = model_card(chosen, run, 0)
    assert "| method | IW-OPD |" in card
    assert "overlap" not in card


def test_the_model_card_has_licence_base_model_and_settings_that_are_defaults(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    chosen = config(method={"weights": "cumulative-share"})
    run.create(chosen, "data")
    card = model_card(chosen, run, 0)
    assert 'license: "apache-2.0"' in card  # of the embedded world, which is no hub's
    assert "base_model" not in card
    for words in ("gamma = 0.5", "blend = true", "max_tokens = 80", 'precision = "no"'):  # nobody set them
        assert words in card
    student = tmp_path / "models--Some-Owner--small-1.5B" / "snapshots" / "0123"
    student.mkdir(parents=True)
    (student / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    mine = {"models": {"student": str(student), "teacher": str(student)}, "data": {"prompts": "prompts.jsonl"}}
    chosen = make_config({**mine, "rollout": {"max_tokens": 9}, "lora": {"rank": 4}})
    card = model_card(chosen, run, 0)
    assert 'base_model: "Some-Owner/small-1.5B"\nbase_model_relation: "adapter"\nlicense: "mit"\n' in card
    assert str(tmp_path) not in card


# --- strict and lenient ---------------------------------------------------------------------------------------------------


def test_a_damaged_line_stops_a_strict_reader_and_is_noted_by_a_lenient_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], "{\n", *lines[3:], '{"step": 11}']))
    with pytest.raises(RunError, match=r"metrics.jsonl, line 3 is damaged"):
        list(RunDirectory(folder).read("metrics.jsonl"))
    notes = Notes()
    assert len(Run(folder, "run", notes).metrics) == 9  # an unfinished last line is left out, even if it could be read
    assert any("1 of 11 lines" in note.text for note in notes.items)
    assert any("the last line is cut off" in note.text for note in notes.items)


def test_the_settings_of_an_older_run_are_read_under_their_new_names(tmp_path: Path) -> None:
    """Older versions wrote `[vllm]`, and the settings of ExOPD beside every method."""
    run = RunDirectory(tmp_path / "run")
    config = make_config({"models": {"world": "clean"}})
    run.create(config, "data")
    saved = tomllib.loads((run.path / "config.toml").read_text())
    del saved["method"]["objective"]
    saved["method"] |= {"scale": 1.25, "weighting": "reward-scale"}
    saved["vllm"] = {"memory_share": 0.7, "patience": 30.0, "mismatch_limit": 0.1, "eager": False}
    (run.path / "config.toml").write_text(tomli_w.dumps(saved))
    old = run.config()
    assert (old.engine.vllm.memory_share, old.engine.server.patience, old.rollout.mismatch_limit) == (0.7, 30.0, 0.1)
    assert old.method == config.method
    with pytest.raises(ConfigError, match=r"'vllm.memory_share' is called 'engine.vllm.memory_share' now"):
        load_config(run.path / "config.toml")  # as a recipe it is corrected by hand
    other = load_config(run.path / "config.toml", {"method.objective": "divergence"}, saved=True)
    assert other.method.objective == "divergence"
    with pytest.raises(ConfigError, match="clip is not used by objective 'divergence'"):
        load_config(run.path / "config.toml", {"method.objective": "divergence", "method.clip": 0.3}, saved=True)


DAMAGED = [
    b"{\n",
    b"\xff\xfe\x00\n",
    b'{"step": 3, "loss": "\xff"}\n',
    b"null\n",
    b'{"loss": 1.0}\n',
    b'{"step": "3"}\n',
    b'{"step": true}\n',
    b'{"step": 1' + b"0" * 400 + b"}\n",
    b'{"step": 3, "loss": 1' + b"0" * 400 + b"}\n",
    b'{"step": 3, "loss": 1e400}\n',
    b'{"step": 3, "loss": {"a": 1}}\n',
    b'{"step": 3, "position/kl": [1, "x"]}\n',
    b"[" * 100_000 + b"\n",
    b'{"step": 3, "loss": 1' + b"0" * 5000 + b"}\n",
]


def test_damaged_lines_do_not_block_a_resume_and_are_kept_aside(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    log, said = folder / "metrics.jsonl", list[str]()
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], *DAMAGED, *lines[2:], b'{"step": 11']))
    RunDirectory(folder).rewind(5, said.append)
    assert log.read_bytes() == b"".join(lines[:5])  # bit for bit
    assert (folder / "metrics.jsonl.damaged").read_bytes() == b"".join(DAMAGED)
    (words,) = said
    assert "metrics.jsonl: damaged lines (line 3, 4, 5, …) were moved to metrics.jsonl.damaged" in words
    assert [record["step"] for record in RunDirectory(folder).read("metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_damaged_evaluations_do_not_block_a_resume(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    log, said = folder / "evals.jsonl", list[str]()
    good = log.read_bytes()
    first = json.loads(good.splitlines()[0])
    changes: list[dict[str, Any]] = [
        {"task": 3},
        {"scores": [["x"]]},
        {"scores": [[10**400]]},
        {"problem_ids": 5},
        {"task": None},
    ]
    log.write_bytes(b"".join(json.dumps({**first, **change}).encode() + b"\n" for change in changes) + good)
    run = RunDirectory(folder)
    run.rewind(10**6, said.append)
    assert log.read_bytes() == good
    assert "evals.jsonl: damaged lines (line 1, 2, 3, …)" in said[0]
    model_card(config(), run, 10)  # reads all of it


def test_an_undamaged_log_is_left_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    before = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    RunDirectory(folder).rewind(10**6, pytest.fail)
    assert {path.name: path.read_bytes() for path in folder.glob("*.jsonl*")} == before


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(config(), "data")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("iwopd.runs.directory.write_atomic", full)
    with pytest.raises(RunError, match=r"cannot write .*config.toml: No space left on device"):
        run.check_resume(config(), "data", allow_changes=False)

"""The lenient reader: whatever state a run directory is in, what is there is read and what is not is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser.report_runs import handoff, lines, make_run, read_lines
from iwopd.report.gathering import gather
from iwopd.report.reading import ReportError, read_all, read_handoff
from iwopd.runs.logs import Notes, number, read_log
from iwopd.runs.reading import read_runs


def texts(notes: Notes) -> str:
    return "\n".join(f"{note.where}: {note.text}" for note in notes.items)


def test_whole_run_has_no_notes(tmp_path: Path) -> None:
    notes = Notes()
    (run,) = read_runs([make_run(tmp_path / "run")], notes)
    assert notes.items == []
    assert (run.step, run.steps, run.seed, run.finished) == (20, 20, 0, True)
    assert [result.step for result in run.evals] == [0, 10, 20]
    assert run.column("kl/sampled")[0] == list(range(1, 21))
    assert run.setting("models.world", str) == "drift"
    assert run.setting("models.nothing.at.all", str, "?") == "?"


def test_folder_of_runs_stands_for_them(tmp_path: Path) -> None:
    make_run(tmp_path / "b")
    make_run(tmp_path / "a")
    assert [run.name for run in read_runs([tmp_path], Notes())] == ["a", "b"]


def test_runs_of_equal_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "run") for parent in ("x", "y")]
    assert [run.name for run in read_runs(folders, Notes())] == ["x/run", "y/run"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", None, "run.json is missing"),
        ("run.json", "{", "run.json cannot be read"),
        ("run.json", "[]", "it is not an object"),
        ("run.json", '{"format": 2}', "written in format 2"),
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", "= =", "config.toml cannot be read"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        ("metrics.jsonl", '{"step": 1}\n{"step": 4}\n', "lacks 2 of the steps up to 4"),
        ("metrics.jsonl", '{"step": 1}\n{"step": 1}\n', "1 steps twice"),
        ("metrics.jsonl", '{"step": 1}\n{"step": 2', "the last line is cut off"),
        ("metrics.jsonl", '{"step": 1}\n\x00\xff\n{"step": "2"}\n{"no": 1}\n', "3 of 4 lines"),
        ("evals.jsonl", '{"step": 0, "task": "t", "problem_ids": ["a"], "scores": [[null]]}\n', "1 evaluations have scores"),
        ("evals.jsonl", '{"step": 0, "task": "t", "problem_ids": ["a"], "scores": [[1], [0]]}\n', "1 evaluations have scores"),
        ("evals.jsonl", '{"step": 0, "task": "t", "problem_ids": ["a"], "scores": [[3]]}\n', "1 evaluations have scores"),
    ],
)
def test_damage_is_said_and_the_rest_is_read(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    folder = make_run(tmp_path / "run")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode("latin-1"))
    notes = Notes()
    (run,) = read_runs([folder], notes)
    assert words in texts(notes)
    assert run.metrics or run.evals
    gather([run], notes, None, 1000)


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"nothing to report on.*nowhere: there is no such directory") as caught:
        read_all([tmp_path / "nowhere", tmp_path / "empty"], [], Notes())
    assert "empty: there is no step" in str(caught.value)
    assert caught.value.exit_code == 2


def test_unfinished_run_is_said(tmp_path: Path) -> None:
    notes = Notes()
    read_runs([make_run(tmp_path / "run", steps=10, planned=40)], notes)
    assert texts(notes) == "run: unfinished: 10 of 40 steps so far"


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_line_is_survived(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    path.write_bytes((text + '\n{"step": 3}\n').encode("utf-8", "surrogatepass"))
    records = list(read_log(path, Notes()))
    assert records[-1] == {"step": 3}


def test_deep_and_huge_json_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 100_000 + "\n" + '{"step": ' + "9" * 5000 + '}\n{"step": 1, "loss": 1e999}\n')
    notes = Notes()
    assert [record["step"] for record in read_log(path, notes)] == [1]
    assert "2 of 3 lines" in texts(notes)


def test_numbers() -> None:
    assert [number(value) for value in (1, 2.5, True, False)] == [1.0, 2.5, 1.0, 0.0]
    assert [number(value) for value in (None, "1", float("nan"), float("inf"), 10**400, [1], {})] == [None] * 7


def test_handoff_is_read_and_damage_said(tmp_path: Path) -> None:
    notes = Notes()
    curve = read_handoff(handoff(tmp_path), notes)
    assert curve is not None
    assert curve["points"][0] == (0.0, (90.0, 85.0, 95.0))
    assert len(curve["points"]) == 10
    assert curve["student"] == (30.0, 25.0, 35.0)
    assert notes.items == []
    for content in ("{", "[]", '{"format": 2}', '{"format": 1, "fractions": {}}', '{"format": 1, "fractions": {"x": 1}}'):
        (tmp_path / "bad.json").write_text(content)
        assert read_handoff(tmp_path / "bad.json", notes) is None
    assert read_handoff(tmp_path / "nowhere.json", notes) is None
    assert len(notes.items) == 6


# --- groups -----------------------------------------------------------------------------------------------------------


def test_seeds_of_a_method_are_one_group(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"{name}-{seed}", name, seed=seed) for name in ("iw-opd", "opd") for seed in (0, 1)]
    data = gather(read_runs(folders, Notes()), Notes(), None, 1000)
    assert [(group.label, group.style, len(group.runs)) for group in data.groups] == [("OPD", 0, 2), ("IW-OPD", 1, 2)]
    curve = data.tasks["tiny"][0]
    assert curve.steps == [0, 10, 20]
    assert curve.scores(10).shape == (40, 2)


def test_same_method_with_other_settings_is_another_group(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    with (second / "config.toml").open("a") as file:
        file.write("\n[optim]\nlr = 0.5\n")
    third = make_run(tmp_path / "c")  # the same seed and settings again is no second seed
    data = gather(read_runs([first, second, third], Notes()), Notes(), None, 1000)
    labels = [group.label for group in data.groups]
    assert len(set(labels)) == 3
    assert "OPD (optim.lr 0.5)" in labels
    assert len({group.style for group in data.groups}) == 3


def test_other_tasks_worlds_and_problems_are_noted(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", "iw-opd", task="other")
    (second / "run.json").write_text('{"format": 1, "data": "another"}')
    config = (second / "config.toml").read_text()
    (second / "config.toml").write_text(config.replace("drift", "clean"))
    notes = Notes()
    data = gather(read_runs([first, second], notes), notes, None, 1000)
    assert list(data.tasks) == ["tiny", "other"]
    for words in ("different embedded worlds", "different training prompts", "not evaluated on the task 'tiny'"):
        assert words in texts(notes)
    records = read_lines(second / "evals.jsonl")
    lines(second / "evals.jsonl", [dict(r, task="tiny", problem_ids=[f"x{i}" for i in range(40)]) for r in records])
    notes = Notes()
    gather(read_runs([first, second], notes), notes, None, 1000)
    assert "evaluated on different problems" in texts(notes)


def test_odd_settings_do_not_break_labels(tmp_path: Path) -> None:
    odd = ["method = 3", "[method]\nweights = [1]\nparams = 7", "[method]\nweights = 'x'\n[method.params]\na = {b = 1}", ""]
    folders = []
    for place, text in enumerate(odd):
        folders.append(make_run(tmp_path / str(place)))
        (folders[-1] / "config.toml").write_text(f"seed = true\nsteps = 'many'\n{text}\n")
    data = gather(read_runs(folders, Notes()), Notes(), None, 1000)
    assert len(data.groups) == len(odd)
    assert json.dumps([group.label for group in data.groups])

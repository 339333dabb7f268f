"""Tasks, checkers and trackers of another package, through real entry points of a real (if small) distribution on the path."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iwopd.config import ConfigError, make_config
from iwopd.errors import UserError
from iwopd.eval.catalog import TASKS, find_task, load_task
from iwopd.eval.checkers import CHECKERS
from iwopd.eval.problems import TaskSpec
from iwopd.runs.directory import RunDirectory
from iwopd.trackers import TRACKERS
from iwopd.train.tracking import Tracker
from iwopd.types import StepStats
from models import byte_tokenizer

PLUGIN = """
import json
from iwopd.eval.checkers import OwnProblems
from iwopd.eval.problems import TaskSpec
from iwopd.eval.task import Task, one_by_one

ends_alike = one_by_one(lambda prompt, text: text.endswith(prompt.answer))
echo = OwnProblems(lambda spec, opening: Task(spec.name, [opening.prompt(spec, "e", "Say it")], ends_alike))
number = 3

def spec():
    return TaskSpec("theirs", "ends-alike", samples=3)

class Notebook:
    def __init__(self, folder, project, settings):
        self.file = (folder / "notebook").open("w")
        self.write(project, settings["optim.lr"])

    def write(self, *words):
        self.file.write(json.dumps(words) + "\\n")

    def log(self, step, values):
        self.write(step, values["loss"])

    def close(self):
        self.file.close()
"""

ENTRY_POINTS = """
[iwopd.tasks]
theirs = their_parts:spec
broken = their_parts:TaskSpec.__doc__
[iwopd.checkers]
ends-alike = their_parts:ends_alike
echo = their_parts:echo
number = their_parts:number
absent = no_such_module:checker
[iwopd.trackers]
notebook = their_parts:Notebook
number = their_parts:number
absent = no_such_module:Tracker
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_parts.py").write_text(PLUGIN)
    info = tmp_path / "their_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-parts\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (TASKS, CHECKERS, TRACKERS):
        monkeypatch.setattr(registry, "_plugins", None)
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    yield
    sys.modules.pop("their_parts", None)


def settings(*trackers: str) -> dict[str, Any]:
    return {"models": {"world": "clean"}, "tracking": {"console": "off", "trackers": list(trackers), "project": "p"}}


def test_a_task() -> None:
    assert find_task("theirs") == TaskSpec("theirs", "ends-alike", samples=3)
    with pytest.raises(UserError, match="gives a str, not a TaskSpec"):
        find_task("broken")


def test_a_checker_named_by_a_task_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('checker = "ends-alike"\nfile = "mine.jsonl"\n')
    (tmp_path / "mine.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    task = load_task(find_task(str(tmp_path / "mine.toml")), byte_tokenizer())
    assert [v.score for v in task.check([task.prompts[0]] * 2, ["it is 2", "2 it is"])] == [1.0, 0.0]


def test_a_checker_with_problems_of_its_own() -> None:
    task = load_task(TaskSpec("echoes", "echo"), byte_tokenizer())
    assert (task.name, task.prompts[0].text) == ("echoes", "user: Say it\nassistant: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", r"checker 'number' \(their_parts:number\): must be a function"),
        ("absent", r"checker 'absent' could not be loaded from no_such_module:checker"),
        ("ends-alik", "unknown checker 'ends-alik'; did you mean 'ends-alike'"),
    ],
)
def test_a_checker_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task(TaskSpec("t", name), byte_tokenizer())


def test_a_tracker(tmp_path: Path) -> None:
    """It is known by name when the settings are read, and imported when the run begins."""
    config = make_config(settings("notebook"))
    assert "their_parts" not in sys.modules
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data")
    tracker = Tracker(config, run)
    tracker.step(StepStats(1, 0.25, 2.0, 320, 16, False, {"rollout": 1.0}, {"rollout/length_mean": 20.0}))
    tracker.close()
    assert (tmp_path / "run" / "notebook").read_text().splitlines() == ['["p", 1e-05]', "[1, 0.25]"]


def test_a_tracker_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking.trackers: unknown tracker 'notebok'; did you mean 'notebook'"):
        make_config(settings("notebok"))
    for name, message in [("number", "must be a class or function"), ("absent", "could not be loaded from no_such_module")]:
        config = make_config(settings(name))
        run = RunDirectory(tmp_path / name)
        run.create(config, "data")
        with pytest.raises(ConfigError, match=message):
            Tracker(config, run)

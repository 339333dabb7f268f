"""What a terminal shows of a run: the table, the lines, what is under way, the answer to Ctrl-C, and what alerts say."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from iwopd.config import TeacherSource, make_config
from iwopd.runs.alerts import AlertWatch
from iwopd.runs.directory import RunDirectory
from iwopd.stages import duration, rate
from iwopd.teacher.server import ServerScorer
from iwopd.train import display as display_module
from iwopd.train.activity import Activity
from iwopd.train.display import Display, LiveDisplay, PlainDisplay, open_display
from iwopd.train.headline import ending, headline, resume_command
from iwopd.train.interrupts import interrupts
from iwopd.train.teacher_state import teacher_state
from iwopd.train.tracking import Tracker
from iwopd.types import StepStats


def config(**change: Any) -> Any:
    return make_config({"models": {"world": "clean"}, "steps": 10, **change})


def record(step: int, **change: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 0.5,
        "grad_norm": 1.0,
        "rollouts": 4,
        "skipped": False,
        "kl/sampled": 0.5,
        "gap/abs_mean": 0.7,
        "weights/mean": 1.0,
        "weights/min": 1.0,
        "weights/max": 1.0,
        "rollout/length_mean": 25.0,
        "rollout/truncated": 0.0,
        "rollout/stopped": 0.5,
        "tokens_written": 100,
        "time/rollout": 20.0,
        "time/teacher": 5.0,
        "time/update": 5.0,
        "time/step": 30.0,
        "throughput/tokens_per_second": 100 / 300,
        **change,
    }


def shown(view: Display) -> str:
    assert isinstance(view, PlainDisplay | LiveDisplay)
    return str(view.console.file.getvalue())  # type: ignore[attr-defined]


def plain() -> PlainDisplay:
    return PlainDisplay(config(), Console(file=io.StringIO(), force_terminal=False))


def live() -> LiveDisplay:
    return LiveDisplay(config(), Console(file=io.StringIO(), force_terminal=True, width=140))


def wait_for(view: PlainDisplay, words: str) -> None:
    """Its thread prints when it comes to it."""
    for _ in range(6000):
        if words in shown(view):
            return
        time.sleep(0.01)
    pytest.fail(f"{words!r} was never said: {shown(view)!r}")


def test_slow_machines_write_more_than_0_tokens_a_second() -> None:
    assert rate(100, 300) == "0.33 tok/s"
    assert rate(1600, 10) == "160 tok/s"
    assert rate(0, 10) == rate(10, 0) == ""
    assert [duration(seconds) for seconds in (4, 600, 9000)] == ["4 s", "10 min", "2.5 h"]


def test_the_table_has_what_a_person_waits_for() -> None:
    view = live()
    view.teacher = lambda: "http://gpu1:8000 answers"
    view.evaluation({"step": 0, "task": "tiny", "mean": 0.25, "mean_tokens": 50.0})
    view.step(record(1))
    view.activity.step = 2
    view.activity.stage("rollout")
    view.activity.expect(4)
    view.activity.advance(1, 40)
    view.live.refresh()
    text = shown(view)
    view.close()
    assert "1/10" in text
    assert "min left" in text  # nine steps of 30 s
    assert "step 0: 25.0 %" in text
    assert "100 written, about 100 saved by the horizon (50%)" in text  # four whole answers have 200 tokens
    assert "0.33 tok/s" in text
    assert "http://gpu1:8000 answers" in text
    assert "step 2: the student writes answers: 1 of 4, 40 tokens" in text


def test_a_run_that_goes_on_knows_what_was_before() -> None:
    view = live()
    view.before([record(1), record(2)], [{"step": 0, "task": "tiny", "mean": 0.25, "mean_tokens": 50.0}])
    view.live.refresh()
    text = shown(view)
    view.close()
    assert "2/10" in text
    assert "200 written, about 200 saved" in text


def test_a_long_stage_is_told_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "QUIET_STARTING", 0.0)
    monkeypatch.setattr(display_module, "SHORT", 0.0)
    monkeypatch.setattr(display_module, "PULSE", 0.01)
    view = plain()
    view.activity.stage("loading the student")
    wait_for(view, "loading the student: ")
    view.activity.step = 3
    view.activity.stage("teacher")
    view.activity.expect(8)
    view.activity.scored(2)
    wait_for(view, "step 3/10: the models score them: 2 of 8, ")
    view.close()


def test_ctrl_c_is_answered_at_once_and_a_second_one_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("iwopd.train.interrupts.time", SimpleNamespace(monotonic=lambda: clock[0]))
    view = plain()
    view.activity.step = 7
    with interrupts(view.stopping) as received:
        signal.raise_signal(signal.SIGINT)
        wait_for(view, "finishing step 7; again to stop now")
        assert received == [signal.SIGINT]
        clock[0] += 0.5
        signal.raise_signal(signal.SIGINT)  # a launcher passes one Ctrl-C on twice
        clock[0] += 0.6
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    view.close()
    assert shown(view).count("finishing step") == 1


def test_the_table_answers_ctrl_c_too() -> None:
    view = live()
    view.activity.step = 7
    view.activity.stage("update")
    view.stopping()
    view.live.refresh()
    text = shown(view)
    view.close()
    assert "finishing step 7; again to stop now" in text


def test_only_the_first_of_several_processes_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_display(config(tracking={"console": "off"}))) is Display
    monkeypatch.setenv("RANK", "1")
    assert type(open_display(config(tracking={"console": "plain"}))) is Display


def test_a_teacher_that_scores_early_does_not_count_as_answers_written() -> None:
    activity = Activity()
    activity.stage("rollout")
    activity.scored(3)
    assert activity.done == 0
    activity.processes = 2
    activity.expect(5)
    assert activity.total == 3  # this process has its own part


class Heard:
    """A tracker that takes words."""

    def __init__(self) -> None:
        self.numbers: list[dict[str, float]] = []
        self.words: list[tuple[int, str, str]] = []

    def log(self, step: int, values: Any) -> None:
        self.numbers.append(dict(values))

    def alert(self, step: int, title: str, text: str) -> None:
        self.words.append((step, title, text))

    def close(self) -> None: ...


def test_alerts_are_said_once_and_reach_trackers(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    chosen = config(tracking={"console": "plain"})
    run.create(chosen, "data")
    tracker = Tracker(chosen, run, console=Console(file=io.StringIO(), force_terminal=False))
    heard = Heard()
    tracker.backends = [heard, _Silent()]
    metrics = {name: value for name, value in record(0).items() if "/" in name and not name.startswith("time")}
    metrics |= {"tokens_written": 100, "rollout/truncated": 0.75, "rollout/length_max": 80}
    seconds = {"rollout": 1.0, "teacher": 1.0, "update": 1.0}
    for step in (1, 2, 3):
        tracker.step(StepStats(step, 0.5, 1.0, 100, 4, False, seconds, metrics))
    text = shown(tracker.display)
    tracker.close()
    (said,) = AlertWatch(run.read("metrics.jsonl")).active
    assert [(step, title) for step, title, _ in heard.words] == [(said.since, "Truncation")]
    assert "Raise rollout.max_tokens" in heard.words[0][2]
    assert text.count("ALERT  Truncation since step") == 1
    assert [numbers["alert/truncation"] for numbers in heard.numbers] == [float(step >= said.since) for step in (1, 2, 3)]
    assert "alert/truncation" not in next(run.read("metrics.jsonl"))  # it follows from the rest


class _Silent:
    """A tracker of another package, which takes numbers alone."""

    def log(self, step: int, values: Any) -> None: ...
    def close(self) -> None: ...


def test_a_run_says_what_it_is_and_what_comes_next(tmp_path: Path) -> None:
    served = config(teacher={"urls": ["http://gpu1:8000"], "dialect": "iwopd"}, method={"weights": "cumulative-share"})
    lines = dict(headline(served))
    assert lines["student"] == "student of the embedded world clean (size default, lineage 0)"
    assert lines["teacher"].endswith("served at http://gpu1:8000")
    assert lines["method"].startswith("IW-OPD, 10 steps of ")
    folder = tmp_path / "my run"
    run = RunDirectory(folder)
    run.create(config(), "data")
    for step, score in ((0, 0.0), (10, 1.0)):
        run.append("evals.jsonl", {"step": step, "task": "tiny", "problem_ids": ["a"], "scores": [[score]]})
    said = "\n".join(ending(folder))
    assert "tiny: 0.0 % before training, 100.0 % after step 10" in said
    assert f"iwopd eval --model '{folder}' --tasks tiny" in said
    assert resume_command(folder) == f"iwopd train '{folder}' --resume"


def test_a_server_that_does_not_answer_is_named_with_the_reason() -> None:
    scorer = ServerScorer(TeacherSource(urls=[f"http://gpu{number}:8000" for number in range(4)]))
    replicas = scorer.servers.replicas
    state = teacher_state(config(), scorer)
    for replica in replicas:
        replica.worked(lambda _: None)
    assert state() == "4 servers answer"
    replicas[2].failed("connection refused", lambda _: None)
    assert state().startswith("http://gpu2:8000 does not answer (connection refused) for 0 s, trying again; 3 servers")
    replicas[2].worked(lambda _: None)
    assert state() == "4 servers answer"

"""What a run owes when a part of it fails: evaluations that were cut short, and nothing left open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iwopd.config import make_config
from iwopd.errors import UserError
from iwopd.eval import runner
from iwopd.rollout.engine import ENGINES, EngineError
from iwopd.rollout.local import LocalEngine
from iwopd.runs.directory import RunDirectory
from iwopd.train import assembly, evaluation
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError

SETTINGS: dict[str, Any] = {
    "models": {"world": "clean"},
    "steps": 4,
    "threads": 1,
    "rollout": {"prompts_per_step": 4},
    "data": {"train_size": 32},
    "eval": {"every": 2, "prompts": 4},
    "checkpoint": {"every": 4, "best": "tiny"},
    "tracking": {"console": "off"},
}


def evaluated(folder: Path) -> list[int]:
    return [record["step"] for record in RunDirectory(folder).read("evals.jsonl")]


@pytest.mark.parametrize("when", [2, 4])
def test_an_evaluation_that_a_dead_server_cut_short_is_made_up_for(
    when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_training(make_config(SETTINGS), tmp_path / "whole", doctor=False)
    evaluate = runner.evaluate

    def gone(*arguments: Any, step: int, **options: Any) -> Any:
        if step == when:
            raise EngineError("the rollout server is away")
        return evaluate(*arguments, step=step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", gone)
        with pytest.raises(TrainingStoppedError, match=f"Step {when} was the last finished one and is saved"):
            run_training(make_config(SETTINGS), tmp_path / "run", doctor=False)
    assert evaluated(tmp_path / "run") == [step for step in (0, 2, 4) if step < when]
    resumed = run_training(make_config(SETTINGS), tmp_path / "run", resume=True, doctor=False)
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole") == [0, 2, 4]
    scores = [[record["scores"] for record in RunDirectory(tmp_path / name).read("evals.jsonl")] for name in ("run", "whole")]
    assert scores[0] == scores[1]
    assert resumed == whole  # the best step among the rest


class Watched(LocalEngine):
    """Notes whether it is closed."""

    opened: list[Watched] = []  # noqa: RUF012
    fails = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.closed = False
        Watched.opened.append(self)

    def sampler(self, settings: Any) -> Any:
        if self.fails:
            raise UserError("no sampler for you")
        return super().sampler(settings)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setitem(ENGINES._items, "watched", Watched)
    monkeypatch.setattr(Watched, "opened", [])
    return Watched


def test_a_teacher_that_fails_leaves_no_engine_open(
    watched: type[Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config({**SETTINGS, "rollout": {"prompts_per_step": 4, "engine": "watched"}})

    def no_teacher(*_: Any) -> Any:
        raise UserError("no teacher")

    with monkeypatch.context() as patch:
        patch.setattr(assembly, "build_teacher", no_teacher)
        with pytest.raises(UserError, match="no teacher"):
            run_training(config, tmp_path / "run", doctor=False)
    assert all(engine.closed for engine in watched.opened)
    monkeypatch.setattr(watched, "fails", True)
    with pytest.raises(UserError, match="no sampler"):
        run_training(config, tmp_path / "run", doctor=False)
    assert len(watched.opened) == 1
    assert watched.opened[0].closed
    assert not (tmp_path / "run").exists()


def test_an_engine_is_closed_at_the_end(watched: type[Watched], tmp_path: Path) -> None:
    config = make_config({**SETTINGS, "steps": 1, "rollout": {"prompts_per_step": 4, "engine": "watched"}})
    run_training(config, tmp_path / "run", doctor=False)
    assert [engine.closed for engine in watched.opened] == [True]

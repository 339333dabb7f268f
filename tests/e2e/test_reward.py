"""Rewards in training: they teach by themselves and beside a teacher, cost nothing where they are 0, and a broken checker harms
nobody.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from iwopd.config import make_config
from iwopd.eval.checkers import CHECKERS
from iwopd.eval.task import Verdict, one_by_one
from iwopd.runs.directory import RunDirectory
from iwopd.train import checking, loop
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError
from iwopd.types import Prompt
from models import save_pair
from ranks import train_in_ranks
from waiting import PATIENCE

SHOWS_ANSWER = """
from iwopd.eval.checkers import CHECKERS
from iwopd.eval.task import one_by_one
CHECKERS.add("shows-answer", one_by_one(lambda prompt, text: prompt.answer in text))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random models, and prompts with answers that they write now and then."""
    folder = tmp_path_factory.mktemp("pair")
    settings = save_pair(folder)
    path = folder / "prompts.jsonl"
    items = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**item, "answer": str(n % 10)}) + "\n" for n, item in enumerate(items)))
    rollout = {"prompts_per_step": 8, "samples": 4, "max_tokens": 16}
    return {**settings, "steps": 4, "rollout": rollout, "eval": {"prompts": 0}}


@pytest.fixture(autouse=True)
def _checker(monkeypatch: pytest.MonkeyPatch) -> None:
    right = one_by_one(lambda prompt, text: str(prompt.answer) in text)
    monkeypatch.setitem(CHECKERS._items, "shows-answer", right)


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def train(settings: dict[str, Any], folder: Path, **more: Any) -> list[dict[str, Any]]:
    """The metrics of every step but for the times."""
    run_training(make_config(settings), folder, doctor=False, **more)
    return metrics(folder)


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = RunDirectory(folder).read("metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    return {**load_file(checkpoint / "model" / "model.safetensors"), **load_file(checkpoint / "optimizer.safetensors")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_coefficient_0_is_bit_for_bit_the_run_without(pair: dict[str, Any], tmp_path: Path) -> None:
    without = train(pair, tmp_path / "without")
    logged = train({**pair, "reward": {"checker": "shows-answer", "coefficient": 0}}, tmp_path / "logged")
    added = train({**pair, "reward": {"checker": "shows-answer"}}, tmp_path / "added")
    assert [{name: record[name] for name in without[0]} for record in logged] == without
    assert same(weights(tmp_path / "without", 4), weights(tmp_path / "logged", 4))
    assert all(0 < record["reward/mean"] < 1 for record in logged)
    assert all(record["reward/advantage_abs_mean"] == 0 for record in logged)
    # The first step has the same rollouts in all three, and the reward is the one thing that is new.
    assert added[0]["reward/mean"] == logged[0]["reward/mean"]
    assert added[0]["distillation/advantage_abs_mean"] == logged[0]["distillation/advantage_abs_mean"] > 0
    assert added[0]["reward/advantage_abs_mean"] > 0.1
    assert 0 < added[0]["reward/groups_used"] <= 1
    assert not same(weights(tmp_path / "without", 4), weights(tmp_path / "added", 4))


def test_a_checker_that_raises_gives_no_reward_and_says_so_once(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        raise LookupError("the judge is on leave")

    monkeypatch.setitem(CHECKERS._items, "broken", broken)
    train({**pair, "steps": 2}, tmp_path / "without")
    records = train({**pair, "steps": 2, "reward": {"checker": "broken", "normalize": "none"}}, tmp_path / "run")
    assert [(record["reward/failed"], record["reward/mean"]) for record in records] == [(32, None)] * 2
    assert same(weights(tmp_path / "without", 2), weights(tmp_path / "run", 2))
    said = capsys.readouterr().err
    assert said.count("the checker 'broken' gave no verdict on 32 of 32 rollouts") == 1
    assert "LookupError: the judge is on leave (32 of them)" in said


def test_a_checker_that_hangs_costs_the_reward_of_what_it_hangs_on(
    pair: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    never: threading.Event,
) -> None:
    asked: list[str] = []

    def slow(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        asked.append(prompts[0].id)
        if prompts[0].id == asked[0]:  # all four rollouts of one prompt
            never.wait(PATIENCE)
        return [Verdict("correct", 1.0)]

    monkeypatch.setitem(CHECKERS._items, "slow", slow)
    monkeypatch.setattr(checking, "MOST_HANGING", 6)
    (record,) = train({**pair, "steps": 1, "reward": {"checker": "slow", "timeout": 0.5}}, tmp_path / "run")
    assert record["reward/failed"] == 4
    assert record["reward/mean"] == 1
    assert "gave no verdict on 4 of 32 rollouts" in (said := capsys.readouterr().err)
    assert "no verdict within 0.5 s (reward.timeout)" in said


def test_an_interrupted_run_with_a_reward_resumes_exactly(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**pair, "reward": {"checker": "shows-answer", "normalize": "mean", "coefficient": 0.5}}
    whole = train(settings, tmp_path / "whole")
    step_of = loop.take_step

    def power_cut(config: Any, parts: Any, run: Any, step: int, *more: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return step_of(config, parts, run, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", power_cut)
        with pytest.raises(TrainingStoppedError, match="stopped in step"):
            train(settings, tmp_path / "cut")
    assert len(metrics(tmp_path / "cut")) == 3
    assert train(settings, tmp_path / "cut", resume=True) == whole
    assert same(weights(tmp_path / "whole", 4), weights(tmp_path / "cut", 4))


@pytest.mark.parametrize("truncated", ["mask", "drop"])
def test_rollouts_that_do_not_teach_are_not_judged(truncated: str, pair: dict[str, Any], tmp_path: Path) -> None:
    rollout = {**pair["rollout"], "truncated": truncated, "max_tokens": 24}
    settings = {**pair, "steps": 1, "rollout": rollout, "reward": {"checker": "shows-answer"}}
    (record,) = train(settings, tmp_path / truncated)
    (kept,) = train({**settings, "rollout": {**rollout, "truncated": "keep"}}, tmp_path / "keep")
    assert 0 < record["rollout/truncated"] < 1
    assert record["reward/failed"] == 0
    assert record["reward/mean"] != kept["reward/mean"]


@pytest.mark.slow
def test_two_processes_give_the_rewards_of_one(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**pair, "steps": 2, "reward": {"checker": "shows-answer"}}
    for count in (1, 2):
        train_in_ranks(count, settings, tmp_path / f"run{count}", before=SHOWS_ANSWER)
    one, two = metrics(tmp_path / "run1"), metrics(tmp_path / "run2")
    assert one[0]["reward/groups_used"] > 0
    names = ("reward/mean", "reward/groups_used", "reward/failed", "reward/advantage_abs_mean")
    assert {name: two[0][name] for name in names} == {name: one[0][name] for name in names}
    assert two[1]["loss"] == pytest.approx(one[1]["loss"], abs=1e-4)


@pytest.mark.slow
def test_the_reward_alone_learns_and_takes_nothing_from_distillation(tmp_path: Path) -> None:
    """On the embedded world, from the same student with the same noise: how many problems are solved after ten steps."""
    settings: dict[str, Any] = {
        "steps": 10,
        "threads": 1,
        "models": {"world": "clean"},
        "rollout": {"prompts_per_step": 16, "samples": 8},
        "optim": {"lr": 3e-4},
        "eval": {"every": 10, "prompts": 300, "kept_rollouts": 0},
        "tracking": {"console": "off"},
    }
    methods: dict[str, dict[str, Any]] = {
        "reward": {"method": {"advantage": "none"}, "reward": {"checker": "tiny"}},
        "distillation": {},
        "both": {"reward": {"checker": "tiny"}},
    }
    scores = {}
    for name, more in methods.items():
        train({**settings, **more}, tmp_path / name)
        before, after = RunDirectory(tmp_path / name).read("evals.jsonl")
        scores[name] = torch.tensor(after["scores"]).squeeze(1)
    base = torch.tensor(before["scores"]).squeeze(1)
    assert _surely_more(scores["reward"] - base, 0.1)
    assert _surely_more(scores["distillation"] - base, 0.1)
    assert not _surely_more(scores["distillation"] - scores["both"], 0.0)
    assert all(record["reward/failed"] == 0 for record in metrics(tmp_path / "both"))


def _surely_more(differences: Tensor, than: float) -> bool:
    """Whether the mean over problems lies above, by three standard errors."""
    return float(differences.mean()) - 3 * float(differences.std()) / math.sqrt(len(differences)) > than

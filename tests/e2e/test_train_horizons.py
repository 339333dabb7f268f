"""Training with horizons: what is written, trained on and evaluated, and that runs resume exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from iwopd.config import ConfigError, make_config
from iwopd.eval.checkers import CHECKERS
from iwopd.eval.task import Task, Verdict, one_by_one
from iwopd.rollout.local import LocalSampler
from iwopd.train import assembly, loop
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError
from iwopd.types import Prompt
from models import save_pair
from ranks import train_in_ranks

DRIFT = {"type": "drift", "threshold": 0.05, "block": 4}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = save_pair(tmp_path_factory.mktemp("pair"))
    rollout = {"prompts_per_step": 12, "max_tokens": 24}
    return {**found, "steps": 4, "rollout": rollout, "checkpoint": {"every": 1}, "tracking": {"console": "off"}}


def with_horizon(pair: dict[str, Any], horizon: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    return {**pair, "rollout": {**pair["rollout"], "horizon": horizon, **rollout}}


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def train(settings: dict[str, Any], folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    run_training(make_config(settings), folder, resume=resume)
    return metrics(folder)


def state(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    files = (checkpoint / "model" / "model.safetensors", checkpoint / "optimizer.safetensors")
    return {f"{file.name}/{name}": value for file in files for name, value in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_full_and_a_fixed_horizon_at_the_limit_are_the_run_without_one(pair: dict[str, Any], tmp_path: Path) -> None:
    without = train(pair, tmp_path / "without")
    for name, horizon in (("full", {"type": "full"}), ("fixed", {"type": "fixed", "tokens": 24})):
        assert train(with_horizon(pair, horizon), tmp_path / name) == without
        assert same(state(tmp_path / name), state(tmp_path / "without"))
    assert all(record["tokens_written"] == round(12 * record["rollout/length_mean"]) for record in without)
    assert all(record["rollout/stopped"] == 0 for record in without)


def test_a_drift_that_never_comes_changes_rounding_only(pair: dict[str, Any], tmp_path: Path) -> None:
    without = train(pair, tmp_path / "without")
    watched = train(with_horizon(pair, {**DRIFT, "threshold": 1e-300}), tmp_path / "watched")
    for one, other in zip(watched, without, strict=True):
        assert one["tokens_written"] == other["tokens_written"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


TOP_K = {"objective": "divergence", "support": "top-k", "k": 4, "support_of": "student"}


@pytest.mark.parametrize("method", [{"weights": "survival"}, {"objective": "divergence"}, TOP_K])
def test_a_run_with_drift_stops_answers_and_resumes_exactly(
    method: dict[str, Any], pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**with_horizon(pair, DRIFT), "method": method}
    whole = train(settings, tmp_path / "whole")
    for record in whole:
        assert 0 < record["rollout/stopped"] < 1
        assert record["rollout/stopped"] + record["rollout/truncated"] <= 1
        assert record["tokens"] == record["tokens_written"] == round(12 * record["rollout/length_mean"])
    step_of = loop.take_step

    def power_cut(*given: Any) -> Any:
        if given[3] == 3:
            raise KeyboardInterrupt
        return step_of(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", power_cut)
        with pytest.raises(TrainingStoppedError, match="stopped in step"):
            train(settings, tmp_path / "cut")
    assert train(settings, tmp_path / "cut", resume=True) == whole
    assert same(state(tmp_path / "cut"), state(tmp_path / "whole"))


@pytest.mark.parametrize("truncated", ["mask", "drop"])
def test_a_stopped_answer_is_not_a_truncated_one(truncated: str, pair: dict[str, Any], tmp_path: Path) -> None:
    rare = {**DRIFT, "threshold": 1e-9}
    (record,) = train({**with_horizon(pair, rare, truncated=truncated), "steps": 1}, tmp_path / truncated)
    (kept,) = train({**with_horizon(pair, rare), "steps": 1}, tmp_path / "keep")
    assert record["rollout/stopped"] > 0
    assert record["rollout/truncated"] > 0
    cut_off = 24 * round(12 * kept["rollout/truncated"])
    assert record["tokens"] == kept["tokens"] - cut_off


def test_fixed_and_growing_horizons_limit_training_only(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    write = LocalSampler.write

    def seen(self: LocalSampler, prompts: Any, given: Sequence[int], *more: Any, **options: Any) -> Any:
        limits.append(max(given))
        return write(self, prompts, given, *more, **options)

    monkeypatch.setattr(LocalSampler, "write", seen)
    prompts = [Prompt(str(number), (3, 4, 5)) for number in range(3)]
    task = Task("toy", prompts, one_by_one(lambda prompt, text: False), samples=1, temperature=1.0, max_tokens=24)
    monkeypatch.setattr(assembly, "load_tasks", lambda *_: [task])
    growing = {"type": "growing", "from": 4, "to": 16}
    records = train({**with_horizon(pair, growing), "eval": {"every": 4}}, tmp_path / "growing")
    assert [record["rollout/length_max"] for record in records] == [4, 8, 12, 16]
    assert all(record["rollout/truncated"] == 0 for record in records)
    assert all(record["rollout/stopped"] > 0 for record in records)
    assert limits.count(24) >= 2  # both evaluations write to the end
    assert {4, 8, 12, 16} <= set(limits)


def test_a_budget_is_spent_on_more_prompts_and_resumes_exactly(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**with_horizon(pair, {**DRIFT, "type": "budget", "tokens": 280}), "steps": 6}
    whole = train(settings, tmp_path / "whole")
    assert whole[0]["prompts"] == 12
    assert whole[0]["tokens_written"] < 280
    assert all(record["prompts"] > 12 for record in whole[1:])
    assert all(record["rollouts"] == record["prompts"] for record in whole)
    later = sum(record["tokens_written"] for record in whole[1:])
    assert 0.8 * 5 * 280 < later < 1.3 * 5 * 280
    train({**settings, "steps": 3}, tmp_path / "cut")
    assert train(settings, tmp_path / "cut", resume=True) == whole
    assert same(state(tmp_path / "cut", 6), state(tmp_path / "whole", 6))


def test_stopped_answers_are_not_judged(pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def right(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        judged.append(prompts[0].id)
        return [Verdict("correct", 1.0)]

    monkeypatch.setitem(CHECKERS._items, "right", right)
    lines = [json.loads(line) for line in Path(pair["data"]["prompts"]).read_text().splitlines()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({**line, "answer": "1"}) + "\n" for line in lines))
    more = {"reward": {"checker": "right", "coefficient": 0.0}, "data": {"prompts": str(tmp_path / "prompts.jsonl")}}
    (record,) = train({**with_horizon(pair, DRIFT), "steps": 1, **more}, tmp_path / "run")
    assert record["reward/failed"] == 0
    assert len(judged) == 12 - round(12 * record["rollout/stopped"])


@pytest.mark.slow
def test_two_processes_stop_the_answers_of_one(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**with_horizon(pair, {**DRIFT, "type": "budget", "tokens": 280}), "steps": 2}
    for count in (1, 2):
        train_in_ranks(count, settings, tmp_path / f"run{count}")
    one, two = metrics(tmp_path / "run1"), metrics(tmp_path / "run2")
    for name in ("tokens_written", "prompts", "rollout/stopped", "tokens"):
        assert one[0][name] == two[0][name]
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], abs=1e-5)
    assert one[1]["prompts"] == two[1]["prompts"] > 12


def test_a_teacher_that_cannot_be_followed_is_refused(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from iwopd.teacher.following import LocalFollower

    read = LocalFollower.read

    def forgetful(self: LocalFollower, pieces: Any, *more: Any) -> Any:
        self.leave([piece.row for piece in pieces])
        return read(self, pieces, *more)

    monkeypatch.setattr(LocalFollower, "read", forgetful)
    with pytest.raises(ConfigError, match=r"the teacher \(a Qwen3ForCausalLM\) cannot score answers piece by piece"):
        train(with_horizon(pair, DRIFT), tmp_path / "run")
    train({**with_horizon(pair, {"type": "fixed", "tokens": 8}), "steps": 1}, tmp_path / "fixed")

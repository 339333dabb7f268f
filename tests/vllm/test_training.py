"""Whole runs with vLLM rollouts: the correction stays at 1, evaluation and resume work, stale weights are found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.config import ConfigError, make_config
from iwopd.rollout.vllm import VllmEngine
from iwopd.train.mismatch import MismatchError
from iwopd.train.run import run_training
from vllm_support import training_metrics, training_settings


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_correction_stays_at_one(tmp_path: Path, temperature: float) -> None:
    """Three steps at a learning rate that moves the student: without a sync after every update the ratios would leave 1."""
    run_training(make_config(training_settings(tmp_path, rollout={"temperature": temperature})), tmp_path / "run")
    steps = training_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert abs(step["correction/ratio_mean"] - 1) < 1e-3
        assert step["correction/ratio_deviation"] < 1e-3
        assert step["correction/truncated"] == 0
        assert math.isfinite(step["loss"])
    before, after = (_weights(folder) for folder in (tmp_path / "student", _last(tmp_path)))
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved > 3e-3  # it did move


def test_evaluation_and_resume(tmp_path: Path) -> None:
    """A task's samples come from the engine, too; a resumed run goes on where the other one would have."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(4)))
    evaluation = {"tasks": ["aime25"], "data": {"aime25": str(problems)}, "every": 2, "prompts": 4, "max_tokens": 16}
    tree = training_settings(tmp_path, rollout={"samples": 1}) | {"eval": evaluation}
    run_training(make_config(tree), tmp_path / "whole")
    evals = [json.loads(line) for line in (tmp_path / "whole" / "evals.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in evals] == [0, 2, 3]
    run_training(make_config(tree | {"steps": 2}), tmp_path / "parts")
    run_training(make_config(tree), tmp_path / "parts", resume=True)
    whole, parts = training_metrics(tmp_path / "whole"), training_metrics(tmp_path / "parts")
    assert [step["step"] for step in parts] == [1, 2, 3]
    assert parts[2]["correction/ratio_deviation"] < 1e-3
    assert whole[2]["loss"] == pytest.approx(parts[2]["loss"], rel=1e-3)


def test_an_engine_of_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that is lost is found before the first step; one lost later ends the run at that step."""
    config = make_config(training_settings(tmp_path, rollout={"mismatch_limit": 0.001}))
    whole_sync = VllmEngine._sync
    count = [0]

    def only_once(engine: Any) -> None:
        count[0] += 1
        if count[0] == 1:
            whole_sync(engine)
        engine._synced = None

    monkeypatch.setattr("iwopd.rollout.vllm.VllmEngine._sync", only_once)
    with pytest.raises(MismatchError, match=r"step 2: .*'vllm' differ from the trainer's"):
        run_training(config, tmp_path / "stale")


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_p = 1 and top_k = 0"):
        make_config(training_settings(tmp_path, rollout={"top_p": 0.9}))
    with pytest.raises(ConfigError, match=r"needs engine.server.url"):
        make_config(training_settings(tmp_path, rollout={"engine": "server"}))


def _last(folder: Path) -> Path:
    return max((folder / "run" / "checkpoints").glob("step-*")) / "model"


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next(folder.glob("*.safetensors")))

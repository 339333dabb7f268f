"""Training with the gate: what it follows is part of a checkpoint, and the same in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from iwopd.config import make_config
from iwopd.train import loop
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError
from models import save_pair
from ranks import train_in_ranks

GATED = {"weights": "gated", "params": {"least": -1.0, "slope": 0.5}}
"""A gate that follows every agreement, that of random models, too."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = save_pair(tmp_path_factory.mktemp("pair"))
    rollout = {"prompts_per_step": 12, "max_tokens": 24}
    return {**found, "steps": 4, "rollout": rollout, "checkpoint": {"every": 1}, "tracking": {"console": "off"}}


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def train(settings: dict[str, Any], folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    run_training(make_config(settings), folder, resume=resume)
    return metrics(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / "step-000004"
    files = (checkpoint / "model" / "model.safetensors", checkpoint / "optimizer.safetensors")
    return {f"{file.name}/{name}": value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("objective", [{}, {"objective": "divergence"}], ids=["sampled", "kl"])
def test_a_gated_run_resumes_exactly(
    objective: dict[str, Any], pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**pair, "method": {**objective, **GATED}}
    whole = train(settings, tmp_path / "whole")
    seen = [record["gradient/agreement"] for record in whole]
    assert all(-1 < value < 1 for value in seen)
    assert len(set(seen)) == 4
    means = [0.0]
    total, count = 0.0, 1.0  # it begins with one 0
    for value in seen[:-1]:
        total, count = 0.9 * total + value, 0.9 * count + 1
        means.append(total / count)
    # The least weight is that of tokens after a long drift: the gate itself, from the steps before.
    for record, mean in zip(whole, means, strict=True):
        assert 0.5 * (mean + 1) - 1e-6 <= record["weights/min"] < 0.5 * (mean + 1) + 0.1
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
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_every_run_says_where_its_tokens_pull(pair: dict[str, Any], tmp_path: Path) -> None:
    for name, method in (("uniform", {}), ("survival", {"weights": "survival"}), ("until-drift", {"weights": "until-drift"})):
        (record,) = train({**pair, "steps": 1, "method": method}, tmp_path / name)
        assert -1 < record["gradient/agreement"] < 1


@pytest.mark.slow
def test_two_processes_agree_with_one(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**pair, "steps": 2, "method": {"objective": "divergence", **GATED}}
    for count in (1, 2):
        train_in_ranks(count, settings, tmp_path / f"run{count}")
    one, two = metrics(tmp_path / "run1"), metrics(tmp_path / "run2")
    for name in ("gradient/agreement", "weights/mean", "loss"):
        assert [record[name] for record in two] == pytest.approx([record[name] for record in one], abs=1e-4)
    assert two[0]["gradient/agreement"] == pytest.approx(one[0]["gradient/agreement"], abs=1e-5)

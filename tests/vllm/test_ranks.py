"""Two training ranks with vLLM: an engine in each, or one server for both. The run is that of one rank, weights in sync."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import train_in_ranks
from vllm_support import run_server, save_model, training_metrics, training_settings

SECONDS = 900


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Three prompts a step and one in the evaluation, of which the second of two ranks gets one and none."""
    (folder / "problems.jsonl").write_text(json.dumps({"id": "a", "problem": "1+1", "answer": "2"}) + "\n")
    task = {"tasks": ["aime25"], "data": {"aime25": str(folder / "problems.jsonl")}, "every": 2, "prompts": 1, "max_tokens": 8}
    changes = {**changes, "rollout": {"prompts_per_step": 3, **changes.get("rollout", {})}}
    tree = training_settings(folder, **changes)
    tree["engine"].setdefault("vllm", {})["cache_gb"] = 0.25
    return {**tree, "eval": task, "checkpoint": {"every": 1, "keep": 3}}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{step:06d}/model/model.safetensors")


def assert_same_run(folder: Path, *, deviation: float) -> None:
    """`folder` holds run1 and run2, of one and of two ranks. The student moves more in each step than their difference."""
    one, two = training_metrics(folder / "run1"), training_metrics(folder / "run2")
    assert [step["step"] for step in two] == [1, 2, 3]
    for single, double in zip(one, two, strict=True):
        assert double["tokens"] == single["tokens"]
        assert double["loss"] == pytest.approx(single["loss"], abs=1e-5)
        assert math.isfinite(double["loss"])
        assert abs(double["correction/ratio_mean"] - 1) < deviation
        assert double["correction/ratio_deviation"] < deviation
        assert double["correction/logprob_difference"] < deviation
    before, last, other = weights(folder / "run1", 1), weights(folder / "run1", 3), weights(folder / "run2", 3)
    moved = max(float((last[name] - before[name]).abs().max()) for name in last)
    apart = max(float((last[name] - other[name]).abs().max()) for name in last)
    assert apart < 1e-4 < 3e-3 < moved


def test_each_of_two_ranks_has_an_engine(tmp_path: Path) -> None:
    """Without a sync after every update the ratios would leave 1: the learning rate moves the student."""
    for count in (1, 2):
        train_in_ranks(count, settings(tmp_path), tmp_path / f"run{count}", launcher=True, seconds=SECONDS)
    assert_same_run(tmp_path, deviation=1e-4)


def test_two_ranks_share_a_server(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student", seed=1, tied=False)  # on a CPU a server reloads no tied output matrix
    with run_server(student, tmp_path / "server.log", "--logprobs-mode", "processed_logprobs", dev=True) as url:
        for count in (1, 2):
            server = {"url": url, "weights_folder": str(tmp_path / f"weights{count}")}
            tree = settings(tmp_path, rollout={"engine": "server"}, engine={"server": server})
            train_in_ranks(count, tree, tmp_path / f"run{count}", launcher=True, seconds=SECONDS)
    assert_same_run(tmp_path, deviation=1e-4)


DTYPE = """
from iwopd.rollout.vllm import VllmEngine
start = VllmEngine._start
def say(self):
    llm = start(self)
    print("vLLM computes in", llm.model_config.dtype)
    return llm
VllmEngine._start = say
"""


def test_the_engines_follow_the_runs_precision(tmp_path: Path) -> None:
    """float32 weights under bfloat16 autocast: the engines have bfloat16 weights, and differ by what rounding explains."""
    said = train_in_ranks(
        2, settings(tmp_path, precision="bf16"), tmp_path / "run", before=DTYPE, launcher=True, seconds=SECONDS
    )
    assert said.count("vLLM computes in torch.bfloat16") == 2
    steps = training_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert 1e-3 < step["correction/logprob_difference"] < 0.05
        assert abs(step["correction/ratio_mean"] - 1) < 0.02


FAULTS = {
    "start": """
if os.environ["RANK"] == "1":
    from vllm.v1.worker.cpu_worker import CPUWorker
    def load_model(self, **_):
        raise __import__("torch").OutOfMemoryError("no room for the weights")
    CPUWorker.load_model = load_model
""",
    "step": """
if os.environ["RANK"] == "1":
    from iwopd.rollout.vllm import VllmEngine
    from vllm.v1.engine.llm_engine import LLMEngine
    sync, step, syncs = VllmEngine._sync, LLMEngine.step, []
    def count(self):
        sync(self)
        syncs.append(1)
    def fail(self):
        if len(syncs) == 2:
            raise __import__("torch").OutOfMemoryError("no room for the cache")
        return step(self)
    VllmEngine._sync, LLMEngine.step = count, fail
""",
}


def test_an_engine_that_does_not_start_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 inside vLLM when that happens."""
    said = train_in_ranks(
        2, settings(tmp_path), tmp_path / "run", before=FAULTS["start"], code=1, launcher=True, seconds=SECONDS
    )
    assert "vLLM of training process 1 does not start with this student: no room for the weights" in said


def test_an_engine_that_fails_ends_all_ranks_in_words(tmp_path: Path) -> None:
    said = train_in_ranks(
        2, settings(tmp_path), tmp_path / "run", before=FAULTS["step"], code=1, launcher=True, seconds=SECONDS
    )
    assert said.count("vLLM failed while writing: OutOfMemoryError: no room for the cache") == 2
    assert said.count("Step 1 was the last finished one and is saved") == 2
    assert "]: Traceback" not in said  # torchrun has one of its own

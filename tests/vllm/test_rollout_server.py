"""Rollouts from a real vLLM server: log-probs, weights that reach it through a folder, and servers that cannot do it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from iwopd.config import make_config
from iwopd.rollout.connection import ServerError
from iwopd.rollout.engine import Student
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.server import ServerEngine
from iwopd.rollout.settings import ServerSettings
from iwopd.rollout.weights import WeightSyncError
from iwopd.teacher.local import LocalScorer
from iwopd.train.run import run_training
from iwopd.types import Prompt, Rollout
from vllm_support import IDS, ROWS, about, run_server, save_model, training_metrics, training_settings

TOLERANCE = 1e-4
PROMPTS = [Prompt(f"p{number}", tuple((number + place) % 200 + 2 for place in range(40 + number))) for number in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with an output matrix of its own: vLLM on a CPU does not reload one that is the embedding."""
    return save_model(tmp_path_factory.mktemp("student") / "student", seed=1, tied=False)


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with run_server(folder, log, "--logprobs-mode", "processed_logprobs", dev=True) as address:
        yield address


@pytest.fixture
def student(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def static(url: str, vocab_size: int, name: str | None = None) -> ServerEngine:
    """A server that keeps its own weights: nothing is loaded here."""

    def load() -> Any:
        raise AssertionError("the server has the model")

    return ServerEngine(Student(load, vocab_size=vocab_size, rows=ROWS), ServerSettings(url=url, name=name))


def worst(rollouts: list[Rollout], model: Any, temperature: float, vocab_size: int = IDS) -> float:
    scores = LocalScorer(model, temperature=temperature or 1.0, vocab_size=vocab_size).score(rollouts)
    pairs = zip(rollouts, scores, strict=True)
    return max(float((rollout.rollout_logprobs - score).abs().max()) for rollout, score in pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampled_logprobs_agree_with_transformers(url: str, student: Any, tmp_path: Path, temperature: float) -> None:
    engine = ServerEngine(about(student), ServerSettings(url=url, weights_folder=str(tmp_path)))
    sampler = engine.sampler(SamplingSettings(20, temperature, stop_ids=range(1, 12)))
    rollouts = sampler.sample(PROMPTS, seed=0, step=1, samples=2)
    assert [(rollout.prompt.id, rollout.sample) for rollout in rollouts] == [(f"p{i}", j) for i in range(6) for j in range(2)]
    assert {rollout.stop_reason for rollout in rollouts} <= {"eos", "length"}
    assert max(int(rollout.response_ids.max()) for rollout in rollouts) < IDS
    assert worst(rollouts, student, temperature) < TOLERANCE
    again = sampler.sample(PROMPTS[3:4], seed=0, step=1, samples=2)
    assert [r.response_ids.tolist() for r in again] == [r.response_ids.tolist() for r in rollouts[6:8]]


def test_the_server_follows_the_student(url: str, student: Any, tmp_path: Path) -> None:
    engine = ServerEngine(about(student), ServerSettings(url=url, weights_folder=str(tmp_path)))
    sampler = engine.sampler(SamplingSettings(20, stop_ids=(1,)))
    before = sampler.sample(PROMPTS, seed=0, step=1)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1).add_(0.02)
    assert worst(before, student, 1.0) > 0.1
    assert worst(sampler.sample(PROMPTS, seed=0, step=1), student, 1.0) < TOLERANCE
    assert [path.name for path in tmp_path.iterdir()] == ["weights-000002"]  # the one before is gone


def test_a_static_server_keeps_its_weights(vllm_server: str, vllm_folder: Path) -> None:
    """No folder for weights: for evaluation. With vLLM's defaults, at temperature 1 and without padded ids."""
    rollouts = static(vllm_server, vocab_size=ROWS).sampler(SamplingSettings(16)).sample(PROMPTS, seed=0, step=1)
    model = AutoModelForCausalLM.from_pretrained(vllm_folder, dtype=torch.float32)
    assert worst(rollouts, model, 1.0, vocab_size=ROWS) < TOLERANCE


def test_logprobs_without_temperature_are_refused(vllm_server: str) -> None:
    for sampler in (
        static(vllm_server, vocab_size=ROWS).sampler(SamplingSettings(16, 0.7)),
        static(vllm_server, vocab_size=IDS).sampler(SamplingSettings(16, 1.0)),
    ):
        with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
            sampler.sample(PROMPTS, seed=0, step=1)


def test_a_server_without_development_endpoints_takes_no_weights(vllm_server: str, student: Any, tmp_path: Path) -> None:
    engine = ServerEngine(about(student), ServerSettings(url=vllm_server, weights_folder=str(tmp_path)))
    with pytest.raises(WeightSyncError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.update_weights()


def test_another_name_is_refused(vllm_server: str) -> None:
    with pytest.raises(ServerError, match=r"engine\.server\.name is 'gpt'"):
        static(vllm_server, vocab_size=IDS, name="gpt")


def test_training_through_a_server(url: str, folder: Path, tmp_path: Path) -> None:
    changes = {"rollout": {"engine": "server"}, "engine": {"server": {"url": url, "weights_folder": str(tmp_path / "weights")}}}
    tree = training_settings(tmp_path, **changes)
    tree["models"]["student"] = str(folder)
    run_training(make_config(tree), tmp_path / "run")
    steps = training_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["correction/ratio_deviation"] < 1e-3 for step in steps)
    assert all(abs(step["correction/ratio_mean"] - 1) < 1e-3 for step in steps)

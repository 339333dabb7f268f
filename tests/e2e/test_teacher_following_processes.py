"""`iwopd serve-teacher` as a real process that scores answers while they are written, and runs whose answers it stops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.config import make_config
from iwopd.models import load_model
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.local import LocalScorer
from iwopd.train.run import run_training
from iwopd.types import Piece, Prompt, Rollout
from models import save_pair
from rollout_server import RolloutServer, serving
from served_teacher import asking

STEPS = 3
pytestmark = pytest.mark.slow


@contextmanager
def teacher_process(model: str, port: str = "0") -> Iterator[str]:
    command = [sys.executable, "-m", "iwopd", "serve-teacher", model, "--threads", "1", "--port", port, "--cache-gb", "0.5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving" in line or "rror" in line)
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found is not None, line
        yield found.group()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A student, a teacher who agrees with it for a while, and settings of a run that stops answers where it does not."""
    folder = tmp_path_factory.mktemp("pair")
    settings = save_pair(folder)
    student = load_model(str(folder / "student"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    student.save_pretrained(folder / "teacher")
    horizon = {"type": "drift", "threshold": 0.2, "block": 4}
    rollout = {**settings["rollout"], "horizon": horizon}
    method = {"weights": "survival"}
    return {**settings, "steps": STEPS, "rollout": rollout, "method": method, "tracking": {"console": "off"}}


def steps(settings: dict[str, Any], folder: Path, **change: Any) -> list[dict[str, Any]]:
    run_training(make_config({**settings, **change}), folder)
    return list(RunDirectory(folder).read("metrics.jsonl"))


@pytest.fixture(scope="module")
def local(pair: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return steps(pair, tmp_path_factory.mktemp("local") / "run")


def test_a_served_teacher_stops_the_same_answers(pair: dict[str, Any], local: list[dict[str, Any]], tmp_path: Path) -> None:
    assert all(0.1 < step["rollout/stopped"] < 1 for step in local)
    with teacher_process(pair["models"]["teacher"]) as url:
        for dialect in ("iwopd", "vllm"):
            served = steps(pair, tmp_path / dialect, teacher={"urls": [url], "dialect": dialect})
            for ours, theirs in zip(served, local, strict=True):
                assert ours["tokens_written"] == theirs["tokens_written"]
                assert ours["rollout/stopped"] == theirs["rollout/stopped"]
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)


def test_engine_and_teacher_elsewhere(pair: dict[str, Any], tmp_path: Path) -> None:
    """Rollouts from a server (a stand-in for vLLM's), a teacher in a process of its own: answers stop, and the run learns."""
    engine = RolloutServer(load_model(pair["models"]["student"]))
    rollout = {**pair["rollout"], "engine": "server", "mismatch_limit": 0.01}
    with serving(engine) as writer, teacher_process(pair["models"]["teacher"]) as url:
        server = {"server": {"url": writer, "weights_folder": str(tmp_path / "weights")}}
        change = {"rollout": rollout, "engine": server, "teacher": {"urls": [url], "dialect": "iwopd"}}
        found = steps(pair, tmp_path / "run", **change)
    assert [step["step"] for step in found] == [1, 2, 3]
    for step in found:
        assert 0.1 < step["rollout/stopped"] < 1
        assert step["tokens_written"] < 16 * 24
        assert step["correction/ratio_deviation"] < 1e-3
        assert step["rollout/overrun"] >= 0
    assert engine.under_way == 0


def test_a_server_that_was_killed_and_started_again(pair: dict[str, Any]) -> None:
    """What it had read is gone; the scores of what is new are the same."""
    teacher = pair["models"]["teacher"]
    generator = torch.Generator().manual_seed(1)
    rollouts = [
        Rollout(Prompt(str(row), (2, 3 + row)), torch.randint(21, (24,), generator=generator), torch.zeros(24), "length")
        for row in range(5)
    ]
    expected = LocalScorer(load_model(teacher), vocab_size=21).score(rollouts)

    def block(first: int) -> list[Piece]:
        part = slice(first, first + 8)
        return [Piece(row, one.prompt, one.response_ids[part], torch.zeros(8)) for row, one in enumerate(rollouts)]

    with teacher_process(teacher) as url:
        follower = asking(url, patience=60.0).follow()
        parts = [follower.read(block(0)), follower.read(block(8))]
    with teacher_process(teacher, port=url.rpartition(":")[2]):
        parts.append(follower.read(block(16)))
    for row, scores in enumerate(expected):
        found = torch.cat([part[row].logprobs for part in parts])
        torch.testing.assert_close(found, scores, rtol=0, atol=1e-5)

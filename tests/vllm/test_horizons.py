"""Answers that a teacher stops while the real vLLM writes them, in this process and on a server."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from iwopd.algo.horizons import cut_lengths
from iwopd.config import make_config
from iwopd.config.engines import TeacherSource
from iwopd.rollout.engine import Student
from iwopd.rollout.horizons import Drift
from iwopd.rollout.requests import RequestSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.server import ServerEngine
from iwopd.rollout.settings import ServerSettings
from iwopd.rollout.vllm import VllmEngine
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Follower
from iwopd.teacher.server import ServerScorer
from iwopd.train.run import run_training
from iwopd.train.watching import Watching
from iwopd.types import Piece, Prompt, Rollout
from vllm_support import IDS, ROWS, training_metrics, training_settings

PROMPTS = [Prompt(f"p{number}", tuple((number + place) % 200 + 2 for place in range(20 + number))) for number in range(8)]
HORIZON = Drift(threshold=0.05, block=4)
SETTINGS = SamplingSettings(60, stop_ids=range(1, 4))


def like(model: Any, seed: int = 5, size: float = 0.06) -> Any:
    """A teacher that agrees with the student for a while."""
    teacher = type(model)(model.config).eval()
    teacher.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))
    return teacher


def cut(whole: Sequence[Rollout], scorer: LocalScorer) -> list[int]:
    """Where answers stop that were written to their ends."""
    gaps = [score - one.rollout_logprobs for one, score in zip(whole, scorer.score(whole), strict=True)]
    mask = pad_sequence([torch.ones(len(gap), dtype=torch.bool) for gap in gaps], batch_first=True)
    lengths: list[int] = cut_lengths(
        pad_sequence(gaps, batch_first=True), mask, threshold=HORIZON.threshold, block=HORIZON.block
    ).tolist()
    return lengths


def check_stopped(sampler: RequestSampler, scorer: LocalScorer, follower: Follower) -> None:
    whole = sampler.sample(PROMPTS, seed=0, step=1, samples=2)
    watching = Watching(HORIZON, follower)
    stopped = sampler.sample(PROMPTS, seed=0, step=1, samples=2, watcher=watching)
    assert [len(one) for one in stopped] == cut(whole, scorer)
    assert {one.stop_reason for one in stopped} >= {"horizon"}
    assert len({len(one) for one in stopped}) > 2  # they stop in several places
    for one, other in zip(stopped, whole, strict=True):
        assert one.response_ids.tolist() == other.response_ids[: len(one)].tolist()
        assert float((one.rollout_logprobs - other.rollout_logprobs[: len(one)]).abs().max()) < 1e-4
        assert (one.stop_reason == "horizon") == (len(one) < len(other))
    scores = [one.logprobs for one in watching.scores()]
    for ours, theirs in zip(scores, scorer.score(stopped), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_in_this_process(engine: VllmEngine, student: Any) -> None:
    scorer = LocalScorer(like(student), vocab_size=IDS)
    sampler = engine.sampler(SETTINGS)
    check_stopped(sampler, scorer, scorer.follow())
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_a_watcher_that_fails_leaves_nothing_under_way(engine: VllmEngine, student: Any) -> None:
    class Failing:
        room = 2**31

        def next_look(self, length: int) -> int:
            return length // 4 * 4 + 4

        def look(self, pieces: Sequence[Piece]) -> list[bool]:
            raise ArithmeticError("the teacher is gone")

    sampler = engine.sampler(SETTINGS)
    with pytest.raises(ArithmeticError, match="the teacher is gone"):
        sampler.sample(PROMPTS, seed=0, step=1, watcher=Failing())
    assert not engine.llm.llm_engine.has_unfinished_requests()
    again = sampler.sample(PROMPTS[:2], seed=0, step=1)
    assert [one.response_ids.tolist() for one in again] == [
        one.response_ids.tolist() for one in sampler.sample(PROMPTS, seed=0, step=1)[:2]
    ]


def test_on_a_server(vllm_server: str, vllm_folder: Path) -> None:
    def load() -> Any:
        raise AssertionError("the server has the model")

    model = AutoModelForCausalLM.from_pretrained(vllm_folder, dtype=torch.float32)
    scorer = LocalScorer(like(model), vocab_size=ROWS)
    engine = ServerEngine(Student(load, vocab_size=ROWS, rows=ROWS), ServerSettings(url=vllm_server))
    check_stopped(engine.sampler(SETTINGS), scorer, scorer.follow())
    deadline = time.monotonic() + 20
    while (running := under_way(vllm_server)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running == 0


def under_way(url: str) -> float:
    """Requests that the server says it has."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(f"{url}/metrics", timeout=30).read().decode()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))


def test_a_vllm_teacher_scores_blocks(vllm_server: str, vllm_folder: Path) -> None:
    """It reads everything again at every look; the scores are those of whole answers."""
    scorer = ServerScorer(TeacherSource(urls=[vllm_server]), model=None)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 200, (20,), generator=generator) for _ in PROMPTS]
    rollouts = [Rollout(prompt, one, torch.zeros(20), "length") for prompt, one in zip(PROMPTS, ids, strict=True)]
    follower, found = scorer.follow(), []
    for first in range(0, 20, 5):
        pieces = [
            Piece(row, one.prompt, one.response_ids[first : first + 5], torch.zeros(5)) for row, one in enumerate(rollouts)
        ]
        found.append([scores.logprobs for scores in follower.read(pieces)])
    for ours, theirs in zip(zip(*found, strict=True), scorer.score(rollouts), strict=True):
        torch.testing.assert_close(torch.cat(ours), theirs, rtol=0, atol=1e-4)


def test_three_steps(tmp_path: Path) -> None:
    horizon = {"type": "drift", "threshold": 0.05, "block": 4}
    tree = training_settings(tmp_path, rollout={"max_tokens": 40, "horizon": horizon}, method={"weights": "survival"})
    like(AutoModelForCausalLM.from_pretrained(tmp_path / "student")).save_pretrained(tmp_path / "teacher")
    run_training(make_config(tree), tmp_path / "run")
    steps = training_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["correction/ratio_deviation"] < 1e-3 for step in steps)
    assert all(0 < step["rollout/stopped"] <= 1 for step in steps)
    assert all(step["tokens_written"] < 24 * 40 for step in steps)
    assert all(0 <= step["rollout/overrun"] < step["tokens_written"] for step in steps)

"""A growing horizon on verl: every step has its limit, and evaluations write to the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_support import steps, train
from iwopd.tiny import open_world

pytestmark = pytest.mark.slow


def test_a_growing_horizon(tmp_path: Path) -> None:
    open_world("clean")  # trains its models if they are not in the cache
    horizon = ["--rollout.horizon.type", "growing", "--rollout.horizon.from", "16", "--rollout.horizon.to", "32"]
    evaluation = ["--eval.every", "3", "--eval.prompts", "8"]
    with train(tmp_path, "run", *horizon, *evaluation, "--checkpoint.every", "3", steps=3) as job:
        assert job.finish() == 0, job.text()[-3000:]
    metrics = steps(tmp_path / "run")
    assert [step["rollout/length_max"] for step in metrics] == [16, 24, 32]
    assert [step["tokens_written"] for step in metrics] == [16 * 16, 16 * 24, 16 * 32]  # the world's answers are longer
    assert [(step["rollout/stopped"], step["rollout/truncated"]) for step in metrics] == [(1, 0)] * 3
    answers = [json.loads(line)["output"] for line in (tmp_path / "run/verl/validation-001/3.jsonl").read_text().splitlines()]
    assert max(map(len, answers)) > 40  # a token of the world is a character at least

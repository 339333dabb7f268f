"""Weight sync that fails: the run must notice before it trains on answers of other weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_support import steps, train
from iwopd.tiny import open_world
from verl_testing import BREAK

RUN_SECONDS = 3600
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            "lost",
            "answered with the weights of step 0, and the student is at step 1: the weight sync did not reach",
        ),
        ("stale", "log-probs of their own answers differ from the trainer's by"),
        ("tensor", "log-probs of their own answers differ from the trainer's by"),
    ],
)
def test_it_ends_the_run_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, words: str) -> None:
    """The first sync works and every later one fails, so the answers of step 2 are not the student's."""
    open_world("clean")
    monkeypatch.setenv(BREAK, broken)
    with train(tmp_path, "run", "--optim.lr", "0.003", "--eval.prompts", "0", steps=4) as job:
        assert job.finish(RUN_SECONDS) == 1
        said = job.text()
    assert f"step 2: the rollout servers{' ' if broken == 'lost' else chr(39) + ' '}{words}" in said, said[-3000:]
    assert "The newest checkpoint is of step 1: continue with --resume" in said
    assert [step["step"] for step in steps(tmp_path / "run")] == [1]

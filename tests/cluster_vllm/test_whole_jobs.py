"""Recipes through launcher, Ray, verl's vLLM replicas of student and teacher, FSDP2 workers and weight sync, on a CPU."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster_support import steps
from cluster_vllm_support import STEPS, Followed, follow, held_by_vllm
from iwopd.tiny import open_world

GAMMA = 0.5
JOBS = pytest.mark.parametrize("job", ["iw_opd", "forward_kl"])


@pytest.fixture
def folder(job: str, request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(job)
    return found


@JOBS
def test_vllm_writes_with_the_trainers_logprobs(folder: Path) -> None:
    """In every step vLLM's log-probs of what it wrote are the trainer's; an update moves them by far more."""
    metrics = steps(folder / "run")
    assert [step["step"] for step in metrics] == [1, 2, 3]
    for step in metrics:
        assert step["rollouts"] == 16
        assert step["correction/logprob_difference"] < 1e-5  # 3e-7 was seen


def test_correction_stays_at_one(iw_opd: Path) -> None:
    for step in steps(iw_opd / "run"):
        print({name: value for name, value in step.items() if name.startswith("correction/")})
        assert step["correction/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert step["correction/ratio_deviation"] < 1e-4  # 6e-6 was seen
        assert step["correction/truncated"] == 0


@JOBS
def test_vllm_holds_the_trainers_weights_bit_by_bit(folder: Path) -> None:
    """It starts with random ones, so all it holds came by weight sync: once before the first step and after every update."""
    held = held_by_vllm(folder / "synced", replica=0)
    assert len(held) == 1 + STEPS
    saved = [folder / "run" / "checkpoints" / f"step-{step:06d}" / "model" for step in range(1, 1 + STEPS)]
    for there, path in zip(held, [open_world("clean").student, *saved], strict=True):
        here = load_file(path / "model.safetensors")
        assert there.keys() == here.keys()
        for name, values in here.items():
            assert torch.equal(there[name], values.float()), (path, name)
    for before, after in pairwise(held):
        assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


@JOBS
def test_the_local_learner_arrives_at_the_same_weights(folder: Path) -> None:
    """On the answers that vLLM wrote: teacher scores, weights, losses and updates of the steps are those of this package."""
    metrics = steps(folder / "run")
    local: Followed = follow(folder)
    print(f"losses {[step['loss'] for step in metrics]} and {local.losses}; relative {local.apart / local.moved:.1e}")
    assert [step["tokens"] for step in metrics] == local.tokens
    assert [step["loss"] for step in metrics] == pytest.approx(local.losses, rel=1e-4)
    assert local.moved > 0.01
    assert local.apart / local.moved < 1e-3  # 1e-4 was seen


def test_weights_are_in_their_range(iw_opd: Path) -> None:
    """Share weights lie in [1, 1 + gamma] and reach both ends."""
    for step in steps(iw_opd / "run"):
        assert step["weights/min"] == pytest.approx(1, abs=1e-6)
        assert step["weights/max"] == pytest.approx(1 + GAMMA, abs=1e-6)
        assert 1 < step["weights/mean"] < 1 + GAMMA
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0


@JOBS
def test_report_reads_it(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    subprocess.run([sys.executable, "-m", "iwopd", "report", str(folder / "run"), "--out", str(page)], check=True)
    text = page.read_text(encoding="utf-8")
    assert "weights" in text
    assert len(text) > 50_000

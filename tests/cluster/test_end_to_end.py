"""A recipe through launcher, Ray, rollout and teacher servers, two FSDP2 workers and weight sync, on tiny models and CPU."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster_support import steps
from iwopd.tiny import open_world

GAMMA = 0.5
pytestmark = pytest.mark.slow


def test_correction_stays_at_one(whole_run: Path) -> None:
    """Without a sync after every update the server's log-probs would leave the trainer's: the learning rate is high enough."""
    metrics = steps(whole_run)
    assert [step["step"] for step in metrics] == [1, 2, 3, 4]
    for step in metrics:
        assert step["correction/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert step["correction/ratio_deviation"] < 1e-4
        assert step["correction/truncated"] == 0


def test_weights_and_loss(whole_run: Path) -> None:
    """Share weights lie in [1, 1 + gamma] and reach both ends; the loss is that of a weighted gap."""
    for step in steps(whole_run):
        assert step["weights/min"] == pytest.approx(1, abs=1e-6)
        assert step["weights/max"] == pytest.approx(1 + GAMMA, abs=1e-6)
        assert 1 < step["weights/mean"] < 1 + GAMMA
        assert math.isfinite(step["loss"])
        assert step["loss"] > 0  # the gap is negative in the mean, and its weights are positive
        assert step["grad_norm"] > 0
        assert step["rollouts"] == 16


def test_the_student_moved(whole_run: Path) -> None:
    """Checkpoints are plain folders with other weights than the student's at the start: all matrices were trained."""
    last = whole_run / "checkpoints" / "step-000004" / "model"
    before = load_file(open_world("clean").student / "model.safetensors")
    after = load_file(last / "model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        moved = float((values - after[name].to(values.dtype)).abs().max())
        assert moved < 4 * 4 * 3e-4, name  # Adam moves a weight by about the learning rate a step
        assert moved > 0 or values.ndim == 1, name
    assert all(torch.isfinite(values).all() for values in after.values())


def test_report_reads_it(whole_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    subprocess.run([sys.executable, "-m", "iwopd", "report", str(whole_run), "--out", str(page)], check=True)
    text = page.read_text(encoding="utf-8")
    assert "weights" in text
    assert len(text) > 50_000

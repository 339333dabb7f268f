"""Divergences against numbers worked out with 50 digits (`make_divergences.py`), their gradients against its differences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd import algo

HERE = Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((HERE / "divergences.json").read_text())


def test_cases_are_what_the_script_prints() -> None:
    command = [sys.executable, HERE / "make_divergences.py"]
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == CASES


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["f64", "f32"])
def test_divergences(dtype: torch.dtype, tolerance: float) -> None:
    """The logits stand in the bias. A support of all ids must be the full vocabulary, whatever the rest is said to be."""
    for case in CASES:
        ids, kind = case["ids"], algo.DivergenceKind(case["divergence"], case["mix"])
        teacher = torch.tensor(case["teacher"], dtype=dtype)
        state, matrix = torch.zeros(1, 1, dtype=dtype), torch.zeros(len(teacher), 1, dtype=dtype)
        weighted = (torch.ones(1, dtype=dtype), torch.ones(1, dtype=torch.bool))
        log_q = teacher.log_softmax(-1)
        others = [log_q[i] for i in range(len(teacher)) if i not in ids] or [torch.tensor(-100.0, dtype=dtype)]
        sent = (torch.tensor([ids]), log_q[ids][None], torch.stack(others).logsumexp(0)[None])
        full = (state, matrix)
        for whole in {True, False} if len(ids) == len(teacher) else {False}:
            logits = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
            options: dict[str, Any] = {"kind": kind, "denominator": 1.0, "bias": logits}
            if whole:
                out = algo.fused_divergence_loss(state, matrix, *full, *weighted, teacher_bias=teacher, **options)
            else:
                out = algo.fused_top_k_loss(state, matrix, *sent, *weighted, **options)
            (slopes,) = torch.autograd.grad(out.loss, logits)
            message = f"{case}, {'full' if whole else 'top-k'}: {out}, {slopes}"
            assert float(out.values) == pytest.approx(case["value"], rel=tolerance, abs=tolerance), message
            assert slopes.tolist() == pytest.approx(case["slopes"], rel=tolerance, abs=tolerance), message

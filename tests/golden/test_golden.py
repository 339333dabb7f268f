"""The formulas against numbers worked out by exact arithmetic (`make_cases.py`), and against hand-worked ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd import algo
from support import length_mask, poison

HERE = Path(__file__).parent
CASES: dict[str, Any] = json.loads((HERE / "cases.json").read_text())


def test_cases_are_what_the_script_prints() -> None:
    printed = subprocess.run([sys.executable, HERE / "make_cases.py"], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == CASES


@pytest.mark.parametrize("case", CASES["weights"], ids=lambda case: f"{case['rule']}-{case['params']}-{case['name']}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["f64", "f32"])
def test_weights(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    lengths = [len(row) for row in case["gaps"]]
    mask = length_mask(lengths, width=max(lengths) + 2)
    gap, expected = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for row, (gaps, weights) in enumerate(zip(case["gaps"], case["weights"], strict=True)):
        gap[row, : len(gaps)] = torch.tensor(gaps, dtype=torch.float64)
        expected[row, : len(weights)] = torch.tensor(weights, dtype=torch.float64)
    weights = algo.token_weights(case["rule"], poison(gap.to(dtype), mask), mask, **case["params"])
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.double(), expected, rtol=tolerance, atol=tolerance)


def test_losses() -> None:
    for case in CASES["loss"]:
        logprob = torch.tensor([[math.log(case["ratio"]) - 1.5]], dtype=torch.float64, requires_grad=True)
        mask = torch.tensor([[True]])
        correction = None if case["correction"] is None else torch.tensor([[case["correction"]]], dtype=torch.float64)
        out = algo.policy_loss(
            logprob,
            torch.tensor([[-1.5]], dtype=torch.float64),
            torch.tensor([[case["advantage"]]], dtype=torch.float64),
            mask,
            denominator=4,
            correction=correction,
        )
        (derivative,) = torch.autograd.grad(out.loss, logprob)
        assert float(out.loss.detach()) == pytest.approx(case["loss"] / 4, abs=1e-12), case
        assert float(derivative) == pytest.approx(case["derivative"] / 4, abs=1e-12), case


def test_hand_worked_rollout() -> None:
    """Gaps -2, 1, -1, 4 (the last one is outside the paper's total): S = 0, 2, 3, 4; total 4."""
    teacher, old = torch.tensor([[-3.0, -1.0, -2.0, -1.0]]), torch.tensor([[-1.0, -2.0, -1.0, -5.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    gap = algo.opd_advantages(teacher, old, mask)
    assert gap.tolist() == [[-2.0, 1.0, -1.0, 4.0]]
    assert algo.token_weights("cumulative-share", gap, mask).tolist() == [[1.5, 1.25, 1.125, 1.0]]
    assert algo.token_weights("cumulative-share", gap, mask, total="all").tolist() == [[1.5, 1.375, 1.3125, 1.25]]
    # Signed: sums before each token 0, -2, -1, -2; total -2; 1 - share = 1, 0, 0.5, 0: the third token rebounds.
    assert algo.token_weights("signed", gap, mask).tolist() == [[1.5, 1.0, 1.25, 1.0]]


def test_hand_worked_exopd() -> None:
    """`1.25 * (-3 + 2) - (-1 + 2) = -2.25`; with weight 1.5: `1.875 * -1 - 1 = -2.875`."""
    one = torch.ones(1, 1, dtype=torch.bool)
    teacher, old, reference = torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    assert algo.exopd_advantages(teacher, old, reference, one).tolist() == [[-2.25]]
    weighted = algo.exopd_advantages(teacher, old, reference, one, weights=torch.tensor([[1.5]]))
    assert weighted.tolist() == [[-2.875]]
    assert (1.5 * algo.exopd_advantages(teacher, old, reference, one)).tolist() == [[-3.375]]  # the other reading

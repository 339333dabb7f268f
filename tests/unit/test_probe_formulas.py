"""Drift, overlap and budget against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from iwopd.algo.budget import effective_share, region_share
from iwopd.algo.drift import drift_regions, first_drift, prefix_sums, rebound
from iwopd.algo.top_k import top_k_overlap
from support import length_mask, poison

GAP = torch.tensor([[-0.5, -2.0, -2.5, 1.0, -3.0], [0.1, -0.2, 0.3, 0.0, 0.0], [-9.0, 4.0, 0.0, 0.0, 0.0]])
MASK = length_mask([5, 3, 2])


def test_a_rollout_is_cut_at_its_first_drift() -> None:
    before, at, after = drift_regions(poison(GAP, MASK), MASK, 2.0)
    assert before.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]  # -2.0 is not below -2
    assert at.int().tolist() == [[0, 0, 1, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]
    assert after.int().tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0, 1, 0, 0, 0]]
    assert first_drift(poison(GAP, MASK), MASK, 2.0).tolist() == [2, -1, 0]
    assert first_drift(GAP, MASK, 0.15).tolist() == [0, 1, 0]


def test_a_drift_threshold_must_be_positive() -> None:
    with pytest.raises(ValueError, match="threshold must be positive"):
        drift_regions(GAP, MASK, 0.0)


def test_prefix_sums_leave_out_the_token_itself() -> None:
    signed = prefix_sums(poison(GAP, MASK), MASK)
    torch.testing.assert_close(signed[0], torch.tensor([0.0, -0.5, -2.5, -5.0, -4.0], dtype=torch.float64))
    torch.testing.assert_close(signed[2], torch.tensor([0.0, -9.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    unsigned = prefix_sums(GAP.abs(), MASK)
    torch.testing.assert_close(unsigned[0], torch.tensor([0.0, 0.5, 2.5, 5.0, 6.0], dtype=torch.float64))


def test_the_rebound_is_the_largest_rise_of_the_signed_sum() -> None:
    # Row 0: -5 up to -4. Row 1: 0, 0.1, -0.1: a rise of 0.1 at once. Row 2: the rise comes with the last token, which no
    # later token sees.
    torch.testing.assert_close(rebound(poison(GAP, MASK), MASK), torch.tensor([1.0, 0.1, 0.0]).double(), atol=1e-7, rtol=0)
    assert rebound(GAP.abs().neg(), MASK).tolist() == [0.0, 0.0, 0.0]
    assert rebound(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_overlap_counts_common_ids() -> None:
    student = torch.tensor([[5.0, 4.0, 3.0, 0.0], [5.0, 4.0, 3.0, 0.0]])
    teacher = torch.tensor([[5.0, 0.0, 4.0, 3.0], [0.0, 5.0, 4.0, 3.0]])
    found = top_k_overlap(student.topk(2).indices, teacher.topk(2).indices)
    assert found.shared.tolist() == [0.5, 0.5]  # {0, 1} and {0, 2}; {0, 1} and {1, 2}
    assert found.same_first.tolist() == [1.0, 0.0]
    assert top_k_overlap(student.topk(4).indices, teacher.topk(4).indices).shared.tolist() == [1.0, 1.0]


def test_effective_tokens_and_shares() -> None:
    def share(*weights: float) -> float:
        w = torch.tensor(weights, dtype=torch.float64)
        return float(effective_share(w.sum(), w.square().sum(), torch.tensor(float(len(w)))))

    assert share(2.0, 2.0, 2.0) == 1.0
    assert share(1.0, 0.0, 0.0, 0.0) == 0.25
    assert math.isclose(share(3.0, 1.0), 16 / 20)
    assert math.isnan(share(0.0, 0.0))
    part = region_share(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
    assert part[0] == 0.25
    assert math.isnan(float(part[1]))

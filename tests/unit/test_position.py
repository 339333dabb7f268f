from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iwopd.algo import position
from support import length_mask, poison, random_batch


def test_fraction_bins_cut_each_response_into_equal_parts() -> None:
    index = position.fraction_bins(length_mask([10, 4, 3, 0]), bins=2)
    assert index.tolist() == [
        [0] * 5 + [1] * 5,
        [0, 0, 1, 1] + [-1] * 6,
        [0, 0, 1] + [-1] * 7,
        [-1] * 10,
    ]


@given(st.integers(1, 2000), st.integers(1, 40))
def test_fraction_bins_are_exact(length: int, bins: int) -> None:
    index = position.fraction_bins(length_mask([length]), bins)[0].tolist()
    assert index == [t * bins // length for t in range(length)]


def test_position_bins_count_tokens() -> None:
    mask = length_mask([7, 2])
    assert position.position_bins(mask, width=3).tolist() == [[0, 0, 0, 1, 1, 1, 2], [0, 0] + [-1] * 5]
    assert position.position_bins(mask, width=3, bins=2).tolist() == [[0, 0, 0, 1, 1, 1, -1], [0, 0] + [-1] * 5]


def test_profile_by_fraction_is_what_a_loop_computes() -> None:
    lengths = [10, 7, 1, 0, 23]
    batch = random_batch(lengths, dtype=torch.float32)
    mask, student, teacher = batch["mask"], batch["old_logprobs"], batch["teacher_logprobs"]
    gap = poison(torch.where(mask, teacher - student, 0.0), mask)
    kl = poison(torch.rand(mask.shape), mask)
    weights = poison(torch.rand(mask.shape) + 1, mask)
    profile = position.position_profile(
        gap, mask, bins=5, kl=kl, weights=weights, student_logprobs=student, teacher_logprobs=teacher
    )
    sums = {name: [0.0] * 5 for name in ("gap", "kl", "weight", "student", "teacher")}
    counts = [0] * 5
    for row, length in enumerate(lengths):
        student_total = teacher_total = 0.0
        for t in range(length):
            bin_ = t * 5 // length
            student_total += float(student[row, t])
            teacher_total += float(teacher[row, t])
            counts[bin_] += 1
            values = (abs(float(gap[row, t])), float(kl[row, t]), float(weights[row, t]), student_total, teacher_total)
            for name, value in zip(sums, values, strict=True):
                sums[name][bin_] += value
    assert profile.tokens.tolist() == counts
    parts = (profile.abs_gap, profile.kl, profile.weights, profile.student_loglikelihood, profile.teacher_loglikelihood)
    for part, total in zip(parts, sums.values(), strict=True):
        assert part is not None
        assert part.mean.tolist() == pytest.approx([s / c for s, c in zip(total, counts, strict=True)], rel=1e-6)
    assert profile.abs_gap.share.tolist() == pytest.approx([s / sum(sums["gap"]) for s in sums["gap"]], rel=1e-6)
    assert float(profile.abs_gap.share.sum()) == pytest.approx(1.0)
    assert profile.edges.tolist() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_profile_by_position() -> None:
    mask = length_mask([5, 2])
    gap = poison(torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0], [10.0, 20.0, 0.0, 0.0, 0.0]]), mask)
    profile = position.position_profile(gap, mask, by="position", width=2)
    assert profile.edges.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert profile.tokens.tolist() == [4, 2, 1]
    assert profile.abs_gap.mean.tolist() == [(1 + 2 + 10 + 20) / 4, 3.5, 5.0]
    assert profile.abs_gap.rollout_means[0].tolist() == [1.5, 3.5, 5.0]
    assert profile.abs_gap.rollout_means[1, 0].item() == 15.0
    assert math.isnan(profile.abs_gap.rollout_means[1, 1].item())
    assert profile.kl is None


def test_batches_can_be_concatenated() -> None:
    mask = length_mask([6, 3])
    values = poison(torch.rand(2, 6), mask)
    index = position.fraction_bins(mask, 3)
    whole = position.bin_values(values, index, 3)
    parts = [position.bin_values(values[i : i + 1], index[i : i + 1], 3) for i in range(2)]
    joined = position.Binned.concatenate(parts)
    assert torch.equal(joined.sums, whole.sums)
    assert torch.equal(joined.counts, whole.counts)
    assert torch.equal(joined.mean, whole.mean)


def test_prefix_loglikelihood_of_a_long_response_keeps_its_digits() -> None:
    logprobs = torch.full((1, 16_384), -0.1)
    total = position.cumulative_loglikelihood(logprobs, torch.ones(1, 16_384, dtype=torch.bool))
    assert total[0, -1].item() == pytest.approx(16_384 * float(torch.tensor(-0.1)), rel=1e-12)


def test_empty_batch_and_no_discrepancy() -> None:
    empty = position.position_profile(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), by="position")
    assert empty.tokens.tolist() == []
    same = position.position_profile(torch.zeros(1, 4), length_mask([4]), bins=2)
    assert same.abs_gap.share.tolist() == [0.0, 0.0]


def test_a_batch_without_valid_tokens() -> None:
    for by in ("fraction", "position"):
        profile = position.position_profile(torch.zeros(2, 3), length_mask([0, 0], width=3), by=by)  # type: ignore[arg-type]
        assert int(profile.tokens.sum()) == 0


def test_bad_arguments_are_named() -> None:
    mask = length_mask([3])
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        position.fraction_bins(mask, 0)
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        position.position_profile(torch.zeros(1, 3), mask, by="position", bins=0)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        position.position_bins(mask, 0)
    with pytest.raises(ValueError, match="by must be 'fraction' or 'position', got 'token'"):
        position.position_profile(torch.zeros(1, 3), mask, by="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values is nan at row 0, token 1"):
        position.bin_values(torch.tensor([[0.0, float("nan"), 0.0]]), position.fraction_bins(mask, 1), 1)

from __future__ import annotations

import pytest
import torch

from iwopd import algo
from support import length_mask, poison, random_batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opd_is_the_difference_inside_and_zero_outside(dtype: torch.dtype) -> None:
    batch = random_batch([5, 0, 3], dtype=dtype)
    mask, teacher, old = batch["mask"], batch["teacher_logprobs"], batch["old_logprobs"]
    advantages = algo.opd_advantages(teacher, old, mask)
    assert torch.equal(advantages[mask], (teacher - old)[mask])
    assert torch.equal(advantages[~mask], torch.zeros_like(advantages[~mask]))


@pytest.mark.parametrize("scale", [0.9, 1.1, 1.25, 1.3])
def test_scale_one_is_opd_and_weight_one_is_exopd_bit_for_bit(scale: float) -> None:
    batch = random_batch([300, 7, 1], dtype=torch.float32)
    mask, teacher, old, reference = (batch[k] for k in ("mask", "teacher_logprobs", "old_logprobs", "reference_logprobs"))
    assert torch.equal(algo.exopd_advantages(teacher, old, reference, mask, scale=1.0), algo.opd_advantages(teacher, old, mask))
    ones = torch.ones_like(teacher)
    assert torch.equal(
        algo.exopd_advantages(teacher, old, reference, mask, scale, weights=ones),
        algo.exopd_advantages(teacher, old, reference, mask, scale),
    )


def test_exopd_is_the_printed_formula() -> None:
    batch = random_batch([40, 9])
    mask, teacher, old, reference = (batch[k] for k in ("mask", "teacher_logprobs", "old_logprobs", "reference_logprobs"))
    weights = algo.token_weights("cumulative-share", algo.opd_advantages(teacher, old, mask), mask)
    plain = 1.25 * (teacher - reference) - (old - reference)
    weighted = 1.25 * weights * (teacher - reference) - (old - reference)
    torch.testing.assert_close(algo.exopd_advantages(teacher, old, reference, mask)[mask], plain[mask])
    got = algo.exopd_advantages(teacher, old, reference, mask, weights=poison(weights, mask))
    torch.testing.assert_close(got[mask], weighted[mask])
    assert not got[~mask].any()


def test_impossible_teacher_token_is_floored_and_counted() -> None:
    mask = length_mask([3, 1])
    teacher = torch.tensor([[-1.0, -torch.inf, -1e4], [-torch.inf, -torch.inf, torch.nan]])
    floored = algo.floor_logprobs(teacher, mask)
    assert floored.floored == 2  # not the one in the padding
    assert floored.logprobs.tolist() == [[-1.0, -100.0, -1e4], [-100.0, 0.0, 0.0]]
    old = torch.full_like(teacher, -0.5)
    # A finite log-prob below the floor stays what it is.
    assert algo.opd_advantages(teacher, old, mask).tolist() == [[-0.5, -99.5, -9999.5], [-99.5, 0.0, 0.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_plus_infinity_are_errors_that_name_the_place(value: float) -> None:
    batch = random_batch([4, 4], dtype=torch.float32)
    batch["teacher_logprobs"][1, 2] = value
    with pytest.raises(ValueError, match=r"teacher_logprobs is (nan|inf) at row 1, token 2"):
        algo.opd_advantages(batch["teacher_logprobs"], batch["old_logprobs"], batch["mask"])


def test_old_logprobs_must_be_finite() -> None:
    batch = random_batch([4], dtype=torch.float32)
    batch["old_logprobs"][0, 0] = -torch.inf
    with pytest.raises(ValueError, match="old_logprobs is -inf at row 0, token 0"):
        algo.opd_advantages(batch["teacher_logprobs"], batch["old_logprobs"], batch["mask"])


def test_bad_arguments_are_named() -> None:
    batch = random_batch([4, 2], dtype=torch.float32)
    mask, teacher, old = batch["mask"], batch["teacher_logprobs"], batch["old_logprobs"]
    with pytest.raises(TypeError, match=r"mask must be boolean, got torch.int64; pass mask.bool\(\)"):
        algo.opd_advantages(teacher, old, mask.long())
    with pytest.raises(TypeError, match=r"teacher_logprobs must be float32 or float64, got torch.bfloat16"):
        algo.opd_advantages(teacher.bfloat16(), old, mask)
    with pytest.raises(ValueError, match=r"teacher_logprobs has shape \[2, 3\], the mask \[2, 4\]"):
        algo.opd_advantages(teacher[:, :3], old, mask)


def test_advantages_are_detached() -> None:
    batch = random_batch([4])
    teacher, old = batch["teacher_logprobs"].requires_grad_(), batch["old_logprobs"].requires_grad_()
    assert not algo.opd_advantages(teacher, old, batch["mask"]).requires_grad
    assert not algo.exopd_advantages(teacher, old, batch["reference_logprobs"], batch["mask"]).requires_grad


def test_rollout_correction_truncates() -> None:
    mask = length_mask([4, 1])
    old = poison(torch.tensor([[-1.0, -1.0, -1.0, -1.0], [-2.0, 0.0, 0.0, 0.0]]), mask)
    engine = poison(torch.tensor([[-1.0, -1.5, -4.0, -200.0], [-1.0, 0.0, 0.0, 0.0]]), mask)
    correction = algo.rollout_correction(old, engine, mask)
    expected = torch.tensor([[1.0, 0.5, 5.0, 5.0], [-1.0, 0.0, 0.0, 0.0]])
    expected[0, 1], expected[1, 0] = torch.tensor(0.5).exp(), torch.tensor(-1.0).exp()
    torch.testing.assert_close(correction, expected)
    assert algo.rollout_correction(old, engine, mask, threshold=2.0).max() == 2.0
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        algo.rollout_correction(old, engine, mask, threshold=0)

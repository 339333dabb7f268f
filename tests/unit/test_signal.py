from __future__ import annotations

from typing import Any

import pytest
import torch

from iwopd import algo
from iwopd.algo.signal import training_signal
from support import RULES, random_batch


@pytest.mark.parametrize(("name", "params"), RULES)
def test_opd_signal_is_gap_times_weights_on_supervised_tokens(name: str, params: dict[str, Any]) -> None:
    batch = random_batch([7, 3, 0])
    mask, teacher, old = batch["mask"], batch["teacher_logprobs"], batch["old_logprobs"]
    signal = training_signal(teacher, old, mask, weights=name, weight_params=params, progress=0.5)
    gap = algo.opd_advantages(teacher, old, mask)
    weights = algo.token_weights(name, gap, mask, progress=0.5, **params)
    assert torch.equal(signal.gap, gap)
    assert torch.equal(signal.weights, weights)
    assert torch.equal(signal.advantages, gap * weights)
    assert torch.equal(signal.supervised, algo.supervised_mask(name, mask, **params))


def test_iw_exopd_applies_the_weights_once() -> None:
    batch = random_batch([7, 3])
    mask, teacher, old, reference = (batch[k] for k in ("mask", "teacher_logprobs", "old_logprobs", "reference_logprobs"))
    common: dict[str, Any] = {"advantage": "exopd", "reference_logprobs": reference, "weights": "cumulative-share"}
    weights = algo.token_weights("cumulative-share", algo.opd_advantages(teacher, old, mask), mask)
    inside = training_signal(teacher, old, mask, **common)
    assert torch.equal(inside.advantages, algo.exopd_advantages(teacher, old, reference, mask, 1.25, weights))
    outside = training_signal(teacher, old, mask, **common, weighting="advantage")
    assert torch.equal(outside.advantages, algo.exopd_advantages(teacher, old, reference, mask) * weights)
    plain = training_signal(teacher, old, mask, **{**common, "weights": "uniform"})
    assert torch.equal(plain.advantages, algo.exopd_advantages(teacher, old, reference, mask))


def test_unsupervised_tokens_get_no_advantage_under_exopd_either() -> None:
    batch = random_batch([10])
    mask, reference = batch["mask"], batch["reference_logprobs"]
    arguments = (batch["teacher_logprobs"], batch["old_logprobs"], mask)
    signal = training_signal(*arguments, advantage="exopd", reference_logprobs=reference, weights="prefix-only")
    assert signal.advantages[0, :3].all()
    assert not signal.advantages[0, 3:].any()


def test_bad_arguments_are_named() -> None:
    batch = random_batch([2])
    arguments = (batch["teacher_logprobs"], batch["old_logprobs"], batch["mask"])
    with pytest.raises(ValueError, match="'exopd' needs reference_logprobs"):
        training_signal(*arguments, advantage="exopd")
    with pytest.raises(ValueError, match=r"advantage must be one of \('opd', 'exopd'\), got 'grpo'"):
        training_signal(*arguments, advantage="grpo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weighting must be one of"):
        training_signal(
            *arguments,
            advantage="exopd",
            reference_logprobs=batch["reference_logprobs"],
            weighting="both",  # type: ignore[arg-type]
        )

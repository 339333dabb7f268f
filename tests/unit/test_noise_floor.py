"""The noise floor: its formula, a model in float32 whatever its weights are, and verl's share of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from iwopd.algo import NoiseFloor, NonFiniteError, mean_difference
from iwopd.cluster.verl.metrics import noise_warning, step_stats
from iwopd.cluster.verl.params import Settings
from iwopd.config import Method, make_config
from iwopd.models import load_model
from iwopd.train.doctor.echo import own_logprobs
from iwopd.train.doctor.float32 import float32_obstacle, in_float32
from iwopd.types import Prompt, Rollout
from models import make_model


def test_both_sides_add_up_and_a_tenth_of_the_gap_is_the_limit() -> None:
    floor = NoiseFloor(student=0.002, teacher=0.003, gap=0.1)
    assert (floor.total, floor.share, floor.summed(16_384)) == pytest.approx((0.005, 0.05, 81.92))
    assert not floor.is_fault
    assert NoiseFloor(0.008, 0.003, 0.1).is_fault
    assert NoiseFloor(0.0, 0.011, 0.1).is_fault


def test_a_pair_of_equal_models_is_no_fault_as_long_as_its_floor_is_negligible() -> None:
    assert NoiseFloor(1e-6, 1e-6, 0.0).share == math.inf
    assert not NoiseFloor(1e-6, 1e-6, 0.0).is_fault
    assert NoiseFloor(1e-4, 0.0, 0.0).is_fault


def test_the_mean_difference_is_taken_in_double_and_of_numbers_only() -> None:
    one = torch.tensor([-1.0, -2.0, -3.0])
    assert mean_difference(one, one + torch.tensor([0.5, -0.25, 0.0])) == 0.25
    assert mean_difference(one[:0], one[:0]) == 0.0
    with pytest.raises(NonFiniteError):
        mean_difference(one, torch.tensor([-1.0, math.nan, -3.0]))
    with pytest.raises(ValueError, match="shape"):
        mean_difference(one, one[:2].clone())


# --- float32 without a second copy -----------------------------------------------------------------------------------


def rollout() -> Rollout:
    ids = torch.randint(2, 21, (12,), generator=torch.Generator().manual_seed(0))
    return Rollout(Prompt("p", (3, 4, 5)), ids, torch.zeros(12), "length")


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "llama"])
def test_a_bfloat16_model_computes_as_its_float32_copy_and_keeps_its_weights(kind: str, tmp_path: Path) -> None:
    make_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    model, wide = load_model(tmp_path, dtype="bfloat16"), load_model(tmp_path)
    before = {name: (values.data_ptr(), values.clone()) for name, values in model.state_dict().items()}
    (expected,) = own_logprobs(wide, [rollout()], 1.0, 21)
    (rounded,) = own_logprobs(model, [rollout()], 1.0, 21)
    with in_float32(model):
        (found,) = own_logprobs(model, [rollout()], 1.0, 21)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((rounded - expected).abs().max()) > 1e-3  # the rounding is there
    for name, values in model.state_dict().items():
        place, old = before[name]
        assert values.data_ptr() == place
        assert torch.equal(values, old)
    assert torch.equal(own_logprobs(model, [rollout()], 1.0, 21)[0], rounded)


def test_weights_come_back_after_an_error_and_autocast_is_off() -> None:
    class Broken(nn.Linear):
        config: Any = object()

        def forward(self, _: Any) -> Any:
            assert self.weight.dtype == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            raise RuntimeError("broken")

    model = Broken(4, 4).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="broken"), in_float32(model):
        model(torch.ones(1, 4))
    assert model.weight.dtype == torch.bfloat16
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_what_cannot_be_widened_is_named() -> None:
    model = make_model("qwen3")
    assert float32_obstacle(model) is None
    model.config.quantization_config = object()
    assert "quantised" in str(float32_obstacle(model))


# --- verl ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # verl, Ray and their dependencies warn at import
def test_verl_measures_engine_against_trainer_on_the_students_tokens() -> None:
    from iwopd.cluster.verl.hook import before_the_split
    from verl_support import nested, rows_of, scores, verl_batch

    given = scores()
    data = verl_batch(given, threshold=5.0, reference=False)
    assert "iwopd/gap/noise_floor" not in before_the_split(data, Settings(Method()), 0.5)[1]  # an engine that tells nothing
    data["rollout_log_probs"] = nested(rows_of(given["rollout"]))
    _, metrics = before_the_split(data, Settings(Method()), 0.5)
    expected = float((given["old"] - given["rollout"])[given["mask"]].double().abs().mean())
    assert expected > 0
    for name in ("gap/noise_floor", "gap/noise_student", "correction/logprob_difference"):
        assert metrics[f"iwopd/{name}"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("floor", "words"), [(0.004, None), (0.006, "12% of the gap")])
def test_a_verl_job_is_told_of_a_floor_above_a_tenth_of_the_gap(floor: float, words: str | None) -> None:
    config = make_config({"models": {"world": "clean"}, "rollout": {"max_tokens": 16384}})
    step = {"actor/distillation/loss": 1.0, "actor/grad_norm": 1.0, "iwopd/gap/abs_mean": 0.05}
    stats = step_stats(config, 1, {**step, "iwopd/gap/noise_student": floor, "iwopd/gap/noise_floor": floor})
    assert stats.metrics["gap/noise_floor"] == floor
    said = noise_warning(config, stats)
    if words is None:
        assert said is None
    else:
        assert said is not None
        assert words in said
        assert "16,384 tokens sums up 98.3 nats" in said
    assert noise_warning(config, step_stats(config, 1, step)) is None  # nothing was measured

"""The precision of the head's products: what rounds and what does not, and that every head of a run has the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.head import OutputHead, fp32_products
from iwopd.algo.objectives import TokenStates, make_objective
from iwopd.algo.top_k import shared_ids
from iwopd.algo.views import Wanted
from iwopd.config import Config, make_config
from iwopd.lm import ResponseModel, Sequences
from iwopd.teacher.local import LocalScorer
from models import make_model

N, V, H = 7, 50, 16


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {"hidden": (N, H), "weight": (V, H), "bias": (V,)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in values.items()}
    return {**made, "targets": torch.randint(V, (N,), generator=generator)}


def by_hand(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return hidden.bfloat16().float() @ weight.bfloat16().float().t() + bias


def test_bfloat16_rounds_the_operands_and_nothing_else() -> None:
    given = inputs()
    logits = by_hand(given["hidden"], given["weight"], given["bias"])
    expected = logits.log_softmax(-1).gather(1, given["targets"][:, None]).squeeze(1)
    got = algo.token_logprobs(**given, precision="bf16")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert float((got - algo.token_logprobs(**given)).abs().max()) > 1e-3


def test_bfloat16_rounds_the_operands_of_both_gradients() -> None:
    given = inputs()
    leaves = {name: given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    upstream = torch.linspace(-1, 1, N)
    (algo.token_logprobs(**leaves, targets=given["targets"], precision="bf16") * upstream).sum().backward()
    probabilities = by_hand(given["hidden"], given["weight"], given["bias"]).softmax(-1)
    dlogits = upstream[:, None] * (torch.nn.functional.one_hot(given["targets"], V) - probabilities)
    rounded = dlogits.bfloat16().float()
    by_hidden, by_weight = rounded @ given["weight"].bfloat16().float(), rounded.t() @ given["hidden"].bfloat16().float()
    torch.testing.assert_close(leaves["hidden"].grad, by_hidden, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves["weight"].grad, by_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves["bias"].grad, dlogits.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_tf32_is_float32_on_a_cpu(stored: torch.dtype) -> None:
    given = inputs()
    given["weight"] = given["weight"].to(stored)
    assert torch.equal(algo.token_logprobs(**given, precision="tf32"), algo.token_logprobs(**given))


def test_the_setting_of_torch_is_that_of_the_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = torch.backends.cuda.matmul
    seen: list[str] = []
    product = torch.mm

    def watched(*arguments: Any, **options: Any) -> Tensor:
        seen.append(settings.fp32_precision)
        return product(*arguments, **options)

    monkeypatch.setattr(torch, "mm", watched)
    before = settings.fp32_precision
    for precision, expected in (("float32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32")):
        algo.token_logprobs(**inputs(), precision=precision)  # type: ignore[arg-type]
        assert set(seen) == {expected}
        assert settings.fp32_precision == before
        seen.clear()
    with pytest.raises(RuntimeError, match="inside"), fp32_products("tf32"):
        raise RuntimeError("inside")
    assert settings.fp32_precision == before


def test_the_kernel_for_bfloat16_is_called_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a meta device: the product that takes bfloat16 and returns float32 exists for CUDA only, and there is none here."""
    monkeypatch.setattr(OutputHead, "_multiplies_half", property(lambda self: True))
    weight, hidden = torch.empty(V, H, device="meta"), torch.empty(N, H, device="meta")
    head = OutputHead.build(hidden, weight, None, 1.0, None, "bf16")
    assert head.operand(hidden).dtype == torch.bfloat16
    logits = head.logits(hidden, torch.empty(N, V, device="meta"))
    assert logits.dtype == torch.float32
    assert head.times_weight(head.operand(logits)).shape == (N, H)
    head.add_product(head.operand(logits).t(), head.operand(hidden), torch.empty(V, H, device="meta"))


@pytest.mark.parametrize("settings", [{"weights": "cumulative-share"}, {"objective": "divergence"}])
def test_objectives_pass_it_on(settings: dict[str, Any]) -> None:
    objective = make_objective(settings)
    student, teacher = inputs(), inputs(1)
    columns = {"old_logprobs": -torch.ones(N), "advantages": torch.ones(N), "weights": torch.ones(N)}
    columns["supervised"] = torch.ones(N, dtype=torch.bool)
    losses = []
    for precision in ("float32", "bf16"):
        sides = [TokenStates(one["hidden"], one["targets"], one["weight"], precision=precision) for one in (student, teacher)]
        moved = [side.to(torch.device("cpu")) for side in sides]
        assert moved[0].precision == precision
        losses.append(float(objective.loss(moved[0], columns, 1.0, moved[1]).loss))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_both_sides_of_an_overlap_and_of_a_kl_are_rounded() -> None:
    one, other = inputs(), inputs()
    other["hidden"] = one["hidden"].bfloat16().float()
    other["weight"] = one["weight"].bfloat16().float()
    sides = (one["hidden"], one["weight"], other["hidden"], other["weight"])
    assert float(algo.token_kl(*sides, precision="bf16").abs().max()) < 1e-6
    assert float(algo.token_kl(*sides).abs().max()) > 1e-6
    top = [
        algo.token_scores(*side, one["targets"], Wanted(top_k=5), precision="bf16").top_ids for side in (sides[:2], sides[2:])
    ]
    assert bool((shared_ids(top[0], top[1]) == 1).all())


def test_a_models_scores_and_check_follow_it() -> None:
    """Rounding beyond float32's tolerance does not make the fused head another one."""
    model = make_model("qwen3", hidden=64).eval()
    sequences = Sequences.build([torch.arange(2, 5)], [torch.arange(5, 20)])
    exact, rounded = (ResponseModel(model, vocab_size=21, head_precision=name) for name in ("float32", "bf16"))  # type: ignore[arg-type]
    with torch.no_grad():
        difference = float((exact.logprobs(sequences) - rounded.logprobs(sequences)).abs().max())
    assert 1e-3 < difference < 0.1
    assert not exact.half
    assert rounded.half
    assert rounded.check_head(sequences).fused
    assert LocalScorer(model, head_precision="bf16").half


def recipe(**settings: Any) -> Config:
    return make_config({"models": {"world": "clean"}, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "float32"),
        ({"precision": "bf16"}, "tf32"),
        ({"models": {"world": "clean", "dtype": "bfloat16"}}, "tf32"),
        ({"models": {"world": "clean", "teacher_dtype": "bfloat16"}}, "float32"),
        ({"precision": "bf16", "head_precision": "float32"}, "float32"),
        ({"head_precision": "bf16"}, "bf16"),
    ],
)
def test_auto_follows_the_student(settings: dict[str, Any], expected: str) -> None:
    assert recipe(**settings).head_products == expected

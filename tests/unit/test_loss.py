from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from support import RULES, length_mask, poison, random_batch

LENGTHS = [9, 0, 4, 1, 12, 6]


def loss_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A batch whose ratios reach past both clips and the dual clip."""
    batch = random_batch(LENGTHS, seed=3, dtype=dtype)
    mask = batch["mask"]
    generator = torch.Generator().manual_seed(4)
    drift = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * 1.3
    batch["logprobs"] = poison((batch["old_logprobs"] + drift.to(dtype)).nan_to_num(0.0), mask)
    gap = algo.opd_advantages(batch["teacher_logprobs"], batch["old_logprobs"], mask)
    batch["advantages"] = poison(gap + 1.5, mask)  # so that both signs are common
    batch["correction"] = poison(algo.rollout_correction(batch["old_logprobs"], batch["rollout_logprobs"], mask), mask)
    return batch


def reference_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, correction: Tensor, mask: Tensor, denominator: float
) -> Tensor:
    """The formula, token by token, in Python."""
    total = torch.zeros((), dtype=torch.float64)
    for row, token in mask.nonzero().tolist():
        eta = (logprobs[row, token] - old[row, token]).exp()
        a = advantages[row, token]
        loss = torch.maximum(-a * eta, -a * eta.clamp(0.8, 1.2))
        if a < 0:
            loss = torch.minimum(loss, -a * 3.0)
        total = total + loss * correction[row, token]
    return total / denominator


def test_loss_and_gradient_agree_with_the_formula_token_by_token() -> None:
    batch = loss_inputs()
    mask, denominator = batch["mask"], float(batch["mask"].sum())
    arguments = batch["old_logprobs"], batch["advantages"]
    ours = batch["logprobs"].clone().requires_grad_()
    theirs = batch["logprobs"].clone().requires_grad_()
    out = algo.policy_loss(ours, *arguments, mask, denominator=denominator, correction=batch["correction"])
    expected = reference_loss(theirs, *arguments, batch["correction"], mask, denominator)
    torch.testing.assert_close(out.loss, expected)
    (gradient,) = torch.autograd.grad(out.loss, ours)
    (expected_gradient,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(gradient[mask], expected_gradient[mask])
    assert not gradient[~mask].any()
    stats = out.stats
    assert int(stats.tokens) == int(mask.sum())
    assert int(stats.clipped_high) > 0
    assert int(stats.clipped_low) > 0
    assert int(stats.dual_clipped) > 0


def test_statistics_are_those_of_the_tokens() -> None:
    mask = length_mask([5, 2])
    ratio = torch.tensor([[1.5, 0.5, 1.0, 4.0, 0.1], [1.1, 0.9, 1.0, 1.0, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    old = torch.full_like(ratio, -2.0)
    out = algo.policy_loss(poison(old + ratio.log(), mask), poison(old, mask), poison(advantages, mask), mask, denominator=7)
    stats = out.stats
    assert (int(stats.clipped_high), int(stats.clipped_low), int(stats.dual_clipped)) == (1, 1, 1)
    assert float(stats.clip_fraction) == pytest.approx(2 / 7)
    assert float(stats.dual_clip_fraction) == pytest.approx(1 / 7)
    assert (float(stats.ratio_min), float(stats.ratio_max)) == pytest.approx((0.1, 4.0))
    k3 = (ratio - 1 - ratio.log())[mask].mean()
    assert float(stats.approx_kl) == pytest.approx(float(k3))
    assert set(stats.as_dict()) == {"clip_fraction", "dual_clip_fraction", "approx_kl", "ratio_min", "ratio_max"}
    # 1.2 and 0.8 for the clipped ones, the dual clip's 3, 0.1 as it is, and 1, 1.1, 0.9.
    assert float(out.loss) == pytest.approx((-1.2 + 0.8 - 1.0 + 3.0 - 0.1 + 1.1 - 0.9) / 7)


@given(st.lists(st.integers(0, 2), min_size=len(LENGTHS), max_size=len(LENGTHS)), st.integers(0, 12))
def test_any_split_adds_up_to_the_whole(owners: list[int], cut: int) -> None:
    """Rows dealt to three micro-batches, and each of those cut in two along the tokens: one denominator, same gradient."""
    batch = loss_inputs()
    mask = batch["mask"]
    names = ("logprobs", "old_logprobs", "advantages")
    whole = batch["logprobs"].clone().requires_grad_()
    out = algo.policy_loss(
        whole, batch["old_logprobs"], batch["advantages"], mask, denominator=17.0, correction=batch["correction"]
    )
    out.loss.backward()
    split = batch["logprobs"].clone().requires_grad_()
    total, parts = torch.zeros((), dtype=torch.float64), []
    for owner in range(3):
        rows = [row for row, who in enumerate(owners) if who == owner]
        for columns in (slice(0, cut), slice(cut, None)):
            pieces = [(split if name == "logprobs" else batch[name])[rows, columns] for name in names]
            correction = batch["correction"][rows, columns]
            part = algo.policy_loss(*pieces, mask[rows, columns], denominator=17.0, correction=correction)
            part.loss.backward()
            total, parts = total + part.loss.detach(), [*parts, part.stats]
    torch.testing.assert_close(total, out.loss.detach())
    assert whole.grad is not None
    assert split.grad is not None
    torch.testing.assert_close(split.grad, whole.grad)
    merged = algo.PolicyStats.merge(parts)
    for name in ("tokens", "clipped_high", "clipped_low", "dual_clipped", "kl_sum", "ratio_min", "ratio_max"):
        torch.testing.assert_close(getattr(merged, name), getattr(out.stats, name))


def test_first_update_has_ratio_one_and_the_plain_policy_gradient() -> None:
    batch = loss_inputs()
    mask, old = batch["mask"], batch["old_logprobs"]
    logprobs = old.clone().requires_grad_()
    out = algo.policy_loss(logprobs, old, batch["advantages"], mask, denominator=int(mask.sum()))
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    torch.testing.assert_close(gradient[mask], -batch["advantages"][mask] / mask.sum())
    assert float(out.stats.clip_fraction) == 0.0
    assert float(out.stats.approx_kl) == 0.0


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("shift", [-1e4, -90.0, 90.0, 1e4])
def test_absurd_ratios_give_finite_losses_and_gradients(advantage: float, shift: float) -> None:
    mask = length_mask([1])
    logprobs = torch.tensor([[shift]], requires_grad=True)
    out = algo.policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, denominator=1)
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert torch.isfinite(out.loss)
    assert float(gradient.abs().max()) < 1e-8


def test_auxiliary_terms() -> None:
    batch = loss_inputs()
    mask, logprobs = batch["mask"], batch["logprobs"].requires_grad_()
    arguments = (logprobs, batch["old_logprobs"], batch["advantages"], mask)
    plain = algo.policy_loss(*arguments, denominator=10.0).loss
    difference = (batch["reference_logprobs"] - logprobs)[mask]
    k3 = (difference.exp() - difference - 1).sum() / 10
    with_kl = algo.policy_loss(*arguments, denominator=10.0, kl_coef=0.3, reference_logprobs=batch["reference_logprobs"]).loss
    torch.testing.assert_close(with_kl, plain + 0.3 * k3)
    entropy = poison(torch.rand(mask.shape, dtype=torch.float64), mask)
    bonus = algo.policy_loss(*arguments, denominator=10.0, entropy_coef=0.2, entropy=entropy).loss
    torch.testing.assert_close(bonus, plain - 0.2 * entropy[mask].sum() / 10)
    with pytest.raises(ValueError, match="reference_logprobs are needed"):
        algo.policy_loss(*arguments, denominator=10.0, kl_coef=0.3)
    with pytest.raises(ValueError, match="entropy of each token is needed"):
        algo.policy_loss(*arguments, denominator=10.0, entropy_coef=0.3)


def test_empty_micro_batch_is_zero_and_differentiable() -> None:
    mask = length_mask([0, 0], width=3)
    logprobs = torch.full((2, 3), float("nan"), requires_grad=True)
    out = algo.policy_loss(logprobs, logprobs.detach(), logprobs.detach(), mask, denominator=5)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    assert out.stats.as_dict()["ratio_min"] == out.stats.as_dict()["ratio_max"] == 1.0
    full = algo.policy_loss(torch.tensor([[2.0]]), torch.zeros(1, 1), torch.ones(1, 1), length_mask([1]), denominator=1)
    merged = algo.PolicyStats.merge([out.stats, full.stats])  # a micro-batch without tokens has no say
    assert float(merged.ratio_min) == float(merged.ratio_max) == float(full.stats.ratio_max)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"denominator": 0}, "denominator must be positive, got 0.0"),
        ({"denominator": float("nan")}, "denominator must be positive, got nan"),
        ({"denominator": torch.tensor(-3)}, "denominator must be positive, got -3.0"),
        ({"clip": 0.0}, "clip must be positive, got 0.0"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    zeros, mask = torch.zeros(1, 2), length_mask([2])
    with pytest.raises(ValueError, match=message):
        algo.policy_loss(zeros, zeros, zeros, mask, **{"denominator": 1.0, **change})


def test_nan_inside_the_mask_is_an_error_with_its_place() -> None:
    zeros, mask = torch.zeros(2, 2), length_mask([2, 2])
    broken = zeros.clone()
    broken[1, 0] = float("nan")
    for values in (broken, broken.clone().requires_grad_()):
        with pytest.raises(algo.NonFiniteError, match="logprobs is nan at row 1, token 0"):
            algo.policy_loss(values, zeros, zeros, mask, denominator=4)


def test_ratio_extremes_are_those_of_valid_tokens_only() -> None:
    """All ratios above 1: padding (a ratio of 1) must not be the smallest."""
    mask = length_mask([2], width=3)
    old = torch.full((1, 3), -3.0)
    out = algo.policy_loss(old + torch.tensor([[1.0, 2.0, 0.0]]), old, torch.ones(1, 3), mask, denominator=2)
    assert float(out.stats.ratio_min) == pytest.approx(2.718282)
    assert float(out.stats.ratio_max) == pytest.approx(7.389056)


def test_only_the_log_probs_carry_a_gradient() -> None:
    batch = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in loss_inputs().items() if name != "mask"}
    leaves = {name: values.clone().requires_grad_() for name, values in batch.items()}
    out = algo.policy_loss(
        leaves["logprobs"],
        leaves["old_logprobs"],
        leaves["advantages"],
        loss_inputs()["mask"],
        denominator=5,
        correction=leaves["correction"],
        kl_coef=0.1,
        reference_logprobs=leaves["reference_logprobs"],
    )
    out.loss.backward()
    assert leaves["logprobs"].grad is not None
    for name in ("old_logprobs", "advantages", "correction", "reference_logprobs"):
        assert leaves[name].grad is None, name


def test_low_variance_kl_keeps_its_gradient_far_away_and_never_goes_below_zero() -> None:
    mask = length_mask([3])
    logprobs = torch.tensor([[0.0, -1.0, -1.0]], requires_grad=True)
    kl = algo.low_variance_kl(logprobs, torch.tensor([[-30.0, -1.0, -500.0]]), mask)
    assert kl[0].tolist() == pytest.approx([29.0, 0.0, 498.0])
    kl.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([1.0, 0.0, 1.0])
    near = torch.linspace(-1e-3, 1e-3, 20_001)[None]
    assert float(algo.low_variance_kl(near, torch.zeros_like(near), near < 1).min()) >= 0.0


# --- fused ----------------------------------------------------------------------------------------------------------


def head_inputs(mask: Tensor, hidden_size: int = 7, vocab: int = 40, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden": poison(randn(*mask.shape, hidden_size), mask[..., None].expand(*mask.shape, hidden_size)),
        "weight": randn(vocab, hidden_size) * 0.5,
        "bias": randn(vocab) * 0.3,
        "targets": torch.where(mask, torch.randint(0, vocab - 5, mask.shape, generator=generator), -7),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"vocab_size": 35},
        {"kl_coef": 0.2},
        {"entropy_coef": 0.1, "temperature": 1.3, "vocab_size": 36},
        {"dual_clip": None, "clip": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [2, 1000], ids=["many chunks", "one chunk"])
def test_fused_equals_policy_loss_on_naive_logprobs(
    options: dict[str, Any], with_bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iwopd.algo.head.CHUNK_ELEMENTS_CPU", rows * 40)
    monkeypatch.setattr("iwopd.algo.head.COLUMNS_CPU", 9)
    batch = loss_inputs()
    mask = batch["mask"]
    inputs = head_inputs(mask)
    if not with_bias:
        del inputs["bias"]
    leaves = {name: inputs[name].clone().requires_grad_() for name in inputs if name != "targets"}
    temperature, vocab_size = options.get("temperature", 1.0), options.get("vocab_size", 40)
    hidden = torch.where(mask[..., None], leaves["hidden"], 0.0)
    logits = (hidden @ leaves["weight"].T + leaves.get("bias", torch.zeros(40)))[..., :vocab_size] / temperature
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, inputs["targets"].clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    shift = logprobs.detach() + torch.where(mask, batch["old_logprobs"] - batch["logprobs"], 0.0)  # ratios on both sides of 1
    terms = {
        "denominator": 23.0,
        "correction": batch["correction"],
        "reference_logprobs": batch["reference_logprobs"],
        **{name: value for name, value in options.items() if name not in ("temperature", "vocab_size")},
    }
    expected = algo.policy_loss(logprobs, shift, batch["advantages"], mask, entropy=entropy, **terms)
    wanted = torch.autograd.grad(3.0 * expected.loss, list(leaves.values()))

    fused_leaves = {name: inputs[name].clone().requires_grad_() for name in leaves}
    out = algo.fused_policy_loss(
        **fused_leaves,
        targets=inputs["targets"],
        old_logprobs=poison(shift, mask),
        advantages=batch["advantages"],
        mask=mask,
        temperature=temperature,
        vocab_size=options.get("vocab_size"),
        **terms,
    )
    (3.0 * out.loss).backward()
    torch.testing.assert_close(out.loss, expected.loss)
    for (name, leaf), gradient in zip(fused_leaves.items(), wanted, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient.nan_to_num(0.0), msg=lambda text, name=name: f"{name}: {text}")
    for name in ("tokens", "clipped_high", "clipped_low", "dual_clipped", "kl_sum", "ratio_min", "ratio_max"):
        torch.testing.assert_close(getattr(out.stats, name), getattr(expected.stats, name))
    assert int(out.stats.clipped_high) > 0
    assert int(out.stats.clipped_low) > 0


def test_fused_gradients_pass_numerical_differentiation() -> None:
    mask = length_mask([3, 2])
    inputs = head_inputs(mask, hidden_size=3, vocab=9)
    hidden, weight, bias = (inputs[name].nan_to_num(0.0, 0.0, 0.0).clamp(-3, 3) for name in ("hidden", "weight", "bias"))
    advantages = torch.tensor([[0.5, -1.0, 2.0], [-0.5, 1.0, 0.0]], dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = algo.fused_policy_loss(
            hidden,
            weight,
            inputs["targets"],
            old,
            advantages,
            mask,
            denominator=5,
            bias=bias,
            temperature=0.8,
            entropy_coef=0.1,
            kl_coef=0.1,
            reference_logprobs=old - 0.3,
        )
        return out.loss

    with torch.no_grad():
        old = algo.token_logprobs(hidden, weight, inputs["targets"].clamp(min=0), bias=bias, temperature=0.8)
        old = old + 0.05  # inside the clip
    torch.autograd.gradcheck(loss, tuple(x.clone().requires_grad_() for x in (hidden, weight, bias)))


def test_fused_any_split_adds_up_to_the_whole() -> None:
    batch = loss_inputs(torch.float32)
    mask = batch["mask"]
    inputs = head_inputs(mask, dtype=torch.float32)
    grads: list[list[Tensor]] = []
    for rows_of_parts in ([[0, 1, 2, 3, 4, 5]], [[4], [0, 3], [1], [5, 2]]):
        leaves = [inputs[name].clone().requires_grad_() for name in ("hidden", "weight")]
        for rows in rows_of_parts:
            out = algo.fused_policy_loss(
                leaves[0][rows],
                leaves[1],
                inputs["targets"][rows],
                batch["old_logprobs"][rows],
                batch["advantages"][rows],
                mask[rows],
                denominator=float(mask.sum()),
            )
            out.loss.backward()
        grads.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    for one, many in zip(*grads, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6)


def test_fused_computes_only_what_is_asked_for() -> None:
    mask = length_mask([4, 2])
    inputs = head_inputs(mask, dtype=torch.float32)
    zeros = torch.zeros(mask.shape)
    arguments = (inputs["targets"], zeros - 1.0, zeros + 1.0, mask)
    hidden = inputs["hidden"].clone().requires_grad_()
    algo.fused_policy_loss(hidden, inputs["weight"], *arguments, denominator=6).loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad[~mask].any()
    assert hidden.grad[mask].any()
    with torch.no_grad():
        out = algo.fused_policy_loss(hidden, inputs["weight"], *arguments, denominator=6)
    assert not out.loss.requires_grad


def test_fused_second_backward_gives_the_same_again() -> None:
    mask = length_mask([2])
    inputs = head_inputs(mask, dtype=torch.float32)
    leaves = [inputs[name].clone().requires_grad_() for name in ("hidden", "weight")]
    old, advantages = torch.full(mask.shape, -3.0), torch.ones(mask.shape)
    out = algo.fused_policy_loss(*leaves, inputs["targets"], old, advantages, mask, denominator=2)
    first = torch.autograd.grad(out.loss, leaves, retain_graph=True)
    second = torch.autograd.grad(2.0 * out.loss, leaves)
    for one, two in zip(first, second, strict=True):
        assert one.any()
        assert torch.equal(2.0 * one, two)


def test_fused_without_valid_tokens_is_zero() -> None:
    mask = length_mask([0], width=3)
    inputs = head_inputs(mask, dtype=torch.float32)
    zeros = torch.zeros(mask.shape)
    hidden = inputs["hidden"].clone().requires_grad_()
    out = algo.fused_policy_loss(hidden, inputs["weight"], inputs["targets"], zeros, zeros, mask, denominator=2)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_fused_names_the_token_whose_hidden_state_is_broken() -> None:
    mask = length_mask([1, 3])
    inputs = head_inputs(mask, dtype=torch.float32)
    inputs["hidden"][1, 2, 4] = float("nan")
    zeros = torch.zeros(mask.shape)
    with pytest.raises(algo.NonFiniteError, match="the hidden state is nan at row 1, token 2"):
        algo.fused_policy_loss(inputs["hidden"], inputs["weight"], inputs["targets"], zeros, zeros, mask, denominator=2)


def test_fused_bad_arguments_are_named() -> None:
    mask = length_mask([2])
    inputs = head_inputs(mask, dtype=torch.float32)
    hidden, weight, targets = inputs["hidden"], inputs["weight"], inputs["targets"]
    zeros = torch.zeros(mask.shape)
    with pytest.raises(ValueError, match=r"targets hold ids 3..38; the vocabulary ends at 34"):
        algo.fused_policy_loss(hidden, weight, torch.tensor([[3, 38]]), zeros, zeros, mask, denominator=2, vocab_size=35)
    with pytest.raises(ValueError, match=r"hidden \[1, 1, 7\] must be the mask's shape \[1, 2\] plus \[H\]"):
        algo.fused_policy_loss(hidden[:, :1], weight, targets, zeros, zeros, mask, denominator=2)
    with pytest.raises(ValueError, match="denominator must be positive"):
        algo.fused_policy_loss(hidden, weight, targets, zeros, zeros, mask, denominator=0)


@pytest.mark.parametrize(("name", "params"), RULES)
def test_a_whole_step_does_not_depend_on_the_split(name: str, params: dict[str, Any]) -> None:
    """Weights on whole rollouts first, then micro-batches: loss and gradient are the same however the rows are dealt."""
    batch = loss_inputs()
    mask, old = batch["mask"], batch["old_logprobs"]
    gap = algo.opd_advantages(batch["teacher_logprobs"], old, mask)
    weights = algo.token_weights(name, gap, mask, progress=0.4, **params)
    supervised = algo.supervised_mask(name, mask, weights=weights, **params)
    gradients = []
    for parts in ([range(6)], [[0], [1, 2], [3, 5], [4]]):
        logprobs = batch["logprobs"].clone().requires_grad_()
        for rows in parts:
            index = list(rows)
            algo.policy_loss(
                logprobs[index],
                old[index],
                (gap * weights)[index],
                supervised[index],
                denominator=float(supervised.sum()),
            ).loss.backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients)
    assert not gradients[0][~supervised].any()

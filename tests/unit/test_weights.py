"""The facts that every implementation of the weights must keep, as properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from support import RULES, length_mask, poison

SHARE_RULES = [rule for rule in RULES if not algo.WEIGHT_RULES[rule[0]].batch_dependent]
finite_gaps = st.floats(-1e4, 1e4, width=32)


@st.composite
def batches(draw: Callable[..., Any], max_rows: int = 4, max_tokens: int = 24) -> tuple[Tensor, Tensor]:
    """A gap [B, T] in float32, rubbish outside the mask, and the mask."""
    lengths = draw(st.lists(st.integers(0, max_tokens), min_size=1, max_size=max_rows))
    mask = length_mask(lengths, width=max(lengths) + draw(st.integers(0, 3)))
    values = draw(st.lists(finite_gaps, min_size=int(mask.sum()), max_size=int(mask.sum())))
    gap = torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(values, dtype=torch.float32))
    return poison(gap, mask), mask


@given(batches(), st.floats(0, 8), st.sampled_from(["paper", "all"]))
def test_iw_weights_are_bounded_and_never_rise(batch: tuple[Tensor, Tensor], gamma: float, total: str) -> None:
    gap, mask = batch
    weights = algo.token_weights("cumulative-share", gap, mask, gamma=gamma, total=total)
    top = torch.tensor(1 + gamma, dtype=torch.float32)  # in float32, like the weights
    for row in range(len(mask)):
        length = int(mask[row].sum())
        inside = weights[row, :length]
        assert (inside >= 1).all()
        assert (inside <= top).all()
        assert (inside.diff() <= 0).all()
        assert not weights[row, length:].any()
        if length:
            assert inside[0] == top
        if total == "paper" and length >= 2 and gap[row, : length - 1].any():
            assert inside[-1] == 1


@given(batches())
def test_gamma_zero_is_standard_opd_bit_for_bit(batch: tuple[Tensor, Tensor]) -> None:
    gap, mask = batch
    uniform = algo.token_weights("uniform", gap, mask)
    for total in ("paper", "all"):
        assert torch.equal(algo.token_weights("cumulative-share", gap, mask, gamma=0, total=total), uniform)
    advantages = torch.where(mask, gap, 0.0)
    assert torch.equal(advantages * uniform, advantages)


@pytest.mark.parametrize(("name", "params"), RULES)
@settings(max_examples=25)
@given(batch=batches())
def test_every_rule_is_finite_and_zero_outside(name: str, params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> None:
    gap, mask = batch
    for normalize in (None, "mean-one"):
        weights = algo.token_weights(name, gap, mask, progress=0.4, normalize=normalize, **params)
        assert weights.shape == mask.shape
        assert torch.isfinite(weights).all()
        assert (weights >= 0).all()
        assert not weights[~mask].any()
        if normalize and weights.any():
            assert float(weights.double().sum() / mask.sum()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("name", "params"), SHARE_RULES)
@settings(max_examples=25)
@given(batch=batches(), order=st.randoms(use_true_random=False))
def test_nothing_depends_on_padding_order_or_company(
    name: str, params: dict[str, Any], batch: tuple[Tensor, Tensor], order: Any
) -> None:
    gap, mask = batch
    weights = algo.token_weights(name, gap, mask, progress=0.4, **params)
    rows = list(range(len(mask)))
    order.shuffle(rows)
    assert torch.equal(algo.token_weights(name, gap[rows], mask[rows], progress=0.4, **params), weights[rows])
    for row in range(len(mask)):
        length = int(mask[row].sum())
        alone = algo.token_weights(name, gap[row : row + 1, :length], mask[row : row + 1, :length], progress=0.4, **params)
        assert torch.equal(alone[0], weights[row, :length])
    padded = torch.nn.functional.pad(gap, (0, 5), value=float("nan"))
    more = algo.token_weights(name, padded, torch.nn.functional.pad(mask, (0, 5)), progress=0.4, **params)
    assert torch.equal(more[:, : mask.shape[1]], weights)
    assert not more[:, mask.shape[1] :].any()


@given(batches(), st.floats(0.1, 50), st.floats(0, 1), st.sampled_from(["negative", "all"]))
def test_survival_starts_at_one_and_never_rises(batch: tuple[Tensor, Tensor], tau: float, floor: float, count: str) -> None:
    gap, mask = batch
    weights = algo.token_weights("survival", gap, mask, tau=tau, floor=floor, count=count)
    for row in range(len(mask)):
        length = int(mask[row].sum())
        inside = weights[row, :length]
        assert (inside[:1] == 1).all()
        assert (inside.diff() <= 0).all()
        assert (inside >= torch.tensor(floor, dtype=torch.float32)).all()
        if count == "negative":  # what the teacher likes better than the student does is no drift
            rising = algo.token_weights("survival", gap[row : row + 1].abs(), mask[row : row + 1], tau=tau, floor=floor)
            assert (rising[0, :length] == 1).all()


def test_survival_by_hand() -> None:
    gap, mask = torch.tensor([[-2.0, 3.0, -1.0, 0.5, 9.0]], dtype=torch.float64), length_mask([4], width=5)
    lost = {"negative": [0.0, 2.0, 2.0, 3.0], "all": [0.0, 2.0, 5.0, 6.0]}
    for count, nats in lost.items():
        expected = [[*(0.25 + 0.75 * math.exp(-x / 2) for x in nats), 0.0]]
        weights = algo.token_weights("survival", gap, mask, tau=2.0, floor=0.25, count=count)
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("params", "words"), [({"tau": 0}, "tau must be positive"), ({"floor": 1.5}, "floor must"), ({"count": "some"}, "count")]
)
def test_survival_refuses(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        algo.token_weights("survival", torch.zeros(1, 2), length_mask([2]), **params)


def test_ideal_depends_on_company_and_says_so() -> None:
    gap = torch.tensor([[-1.0, -1.0], [-3.0, 2.0]])
    mask = length_mask([2, 2])
    together = algo.token_weights("ideal", gap, mask, alpha=1.0)
    alone = algo.token_weights("ideal", gap[:1], mask[:1], alpha=1.0)
    assert algo.WEIGHT_RULES["ideal"].batch_dependent
    assert alone.tolist() == [[1.0, 1.0]]
    torch.testing.assert_close(together[:, 1], torch.tensor([-1.0, -3.0]).softmax(0) * 2)
    assert [rule for rule in algo.WEIGHT_RULES if algo.WEIGHT_RULES[rule].batch_dependent] == ["ideal", "tip", "scope"]


def test_ideal_survives_hopeless_ratios() -> None:
    """Sums of -1e6 and +1e6 under alpha 1: exp would be 0 or inf; in log space the weights are 0, 2 and so on."""
    gap = torch.tensor([[-1e6, 0.0], [1e6, 0.0]])
    assert algo.token_weights("ideal", gap, length_mask([2, 2]), alpha=1.0).tolist() == [[1.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize(("name", "params"), [rule for rule in RULES if rule[0] != "signed"])
def test_long_rollouts_in_float32_agree_with_float64(name: str, params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    gap = torch.randn(2, 16_384, generator=generator, dtype=torch.float64) * 3 - 0.5
    mask = length_mask([16_384, 16_001])
    if name == "ideal":
        params = {**params, "alpha": 0.001}
    double = algo.token_weights(name, gap, mask, progress=0.4, **params)
    single = algo.token_weights(name, gap.float(), mask, progress=0.4, **params)
    assert float((single.double() - double).abs().max()) < 2e-5


def test_signed_long_rollout_in_float32_agrees_with_float64() -> None:
    """With a total that is not near zero: where it is, the signed fraction has no digits left in any precision."""
    gap = torch.randn(2, 16_384, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1.0
    mask = length_mask([16_384, 9_000])
    double, single = (algo.token_weights("signed", g, mask) for g in (gap, gap.float()))
    assert float((single.double() - double).abs().max()) < 2e-5


@pytest.mark.parametrize("ratio", ["0.3", "0.1", "0.7", "0.29", "1", "0.333"])
def test_region_lengths_are_exact_for_every_length(ratio: str) -> None:
    """In floating point 0.7 * 10 is 7.000000000000001, and float32 gets 0.3 * T wrong for hundreds of lengths."""
    lengths = list(range(1, 1025))
    mask = length_mask(lengths)
    expected = [math.ceil(Fraction(ratio) * length) for length in lengths]
    gap = torch.zeros(mask.shape)
    for name in ("prefix-only", "suffix-only"):
        assert algo.token_weights(name, gap, mask, ratio=float(ratio)).sum(-1).tolist() == expected
        assert algo.supervised_mask(name, mask, ratio=float(ratio)).sum(-1).tolist() == expected
    amplified = algo.token_weights("fixed-prefix", gap, mask, ratio=float(ratio), factor=2.0)
    assert (amplified == 2.0).sum(-1).tolist() == expected


def test_regions_lie_where_they_should() -> None:
    mask = length_mask([10, 4])
    prefix, suffix = algo.supervised_mask("prefix-only", mask), algo.supervised_mask("suffix-only", mask)
    assert prefix[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert suffix[0].nonzero().flatten().tolist() == [7, 8, 9]
    assert prefix[1].nonzero().flatten().tolist() == [0, 1]
    assert suffix[1].nonzero().flatten().tolist() == [2, 3]


def test_supervised_mask_is_the_mask_for_all_other_rules() -> None:
    mask = length_mask([3, 0, 5])
    for name in algo.WEIGHT_RULES:
        supervised = algo.supervised_mask(name, mask, weights=torch.ones(mask.shape))
        if name not in ("prefix-only", "suffix-only"):
            assert torch.equal(supervised, mask)
            assert supervised is not mask
    assert torch.equal(algo.supervised_mask("cumulative-share", mask, gamma=1.0, normalize="mean-one"), mask)
    assert torch.equal(algo.supervised_mask("curriculum", mask, progress=0.5), mask)  # takes what token_weights takes


def test_curriculum_grows_from_start_to_end() -> None:
    mask, gap = length_mask([10]), torch.zeros(1, 10)
    counts = {
        schedule: [
            int((algo.token_weights("curriculum", gap, mask, progress=p, schedule=schedule) == 1.5).sum())
            for p in (0.0, 0.25, 0.5, 1.0)
        ]
        for schedule in ("cosine", "linear")
    }
    # Ratios 0.3, 0.4025, 0.65, 1 and 0.3, 0.475, 0.65, 1 of ten tokens, rounded up.
    assert counts == {"cosine": [3, 5, 7, 10], "linear": [3, 5, 7, 10]}
    gap, mask = torch.zeros(1, 100), length_mask([100])
    for schedule, count in (("cosine", 41), ("linear", 48)):
        weights = algo.token_weights("curriculum", gap, mask, progress=0.25, schedule=schedule)
        assert int((weights == 1.5).sum()) == count


def test_holes_in_the_mask_count_as_absent() -> None:
    """A token that is not the model's own (a tool's answer) takes no part: the others are numbered through."""
    gap = torch.tensor([[-1.0, 7.0, 2.0, 7.0, -1.0]])
    holes = torch.tensor([[True, False, True, False, True]])
    for name, params in RULES:
        full = algo.token_weights(name, gap[holes][None], length_mask([3]), progress=0.4, **params)
        assert torch.equal(algo.token_weights(name, gap, holes, progress=0.4, **params)[holes], full[0]), name


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 5)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool)
    for name, params in RULES:
        weights = algo.token_weights(name, torch.zeros(shape), mask, progress=0.0, normalize="mean-one", **params)
        assert weights.shape == shape
        assert algo.supervised_mask(name, mask, weights=weights, **params).shape == shape


def test_weights_are_detached() -> None:
    gap = torch.randn(2, 4, requires_grad=True)
    for name, params in RULES:
        assert not algo.token_weights(name, gap, length_mask([4, 2]), progress=0.1, **params).requires_grad


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "cumulative_share",
            {},
            r"unknown weight rule 'cumulative_share'; did you mean 'cumulative-share'\? choices: uniform,",
        ),
        ("iw", {}, "unknown weight rule 'iw'; choices: uniform, cumulative-share, signed, ideal"),
        ("uniform", {"gamma": 1.0}, "weight rule 'uniform' has no parameter 'gamma'; choices: normalize"),
        ("cumulative-share", {"gama": 1.0}, "has no parameter 'gama'; did you mean 'gamma'"),
        ("curriculum", {"progress": None}, "weight rule 'curriculum' needs progress"),
        ("curriculum", {"progress": 1.5}, r"progress must lie in \[0, 1\], got 1.5"),
        ("curriculum", {"progress": 0.0, "schedule": "step"}, "schedule must be 'cosine' or 'linear', got 'step'"),
        ("cumulative-share", {"gamma": -0.1}, "gamma must be finite and not negative, got -0.1"),
        ("cumulative-share", {"total": "mean"}, "total must be 'paper'"),
        ("ideal", {"alpha": float("nan")}, "alpha must be finite"),
        ("fixed-prefix", {"ratio": 30}, r"ratio must lie in \[0, 1\], got 30"),
        ("uniform", {"normalize": "sum"}, "normalize must be None or 'mean-one', got 'sum'"),
    ],
)
def test_bad_arguments_are_answered_with_the_choices(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algo.token_weights(name, torch.zeros(1, 2), length_mask([2]), **params)


def test_a_gap_that_is_not_finite_is_refused_with_its_place() -> None:
    gap = torch.zeros(2, 3)
    gap[1, 1] = -torch.inf
    with pytest.raises(ValueError, match="gap is -inf at row 1, token 1"):
        algo.token_weights("uniform", gap, length_mask([3, 3]))


def test_one_rollout_without_batch_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask must have shape \[B, T\], got \[3\]"):
        algo.token_weights("uniform", torch.zeros(3), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(("name", "evidence"), [("gated", "agreement"), ("scope", "correct")])
def test_missing_evidence_is_named(name: str, evidence: str) -> None:
    gap, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"weight rule '{name}' needs .*{evidence}.*: pass .*{evidence}="):
        algo.token_weights(name, gap, mask)

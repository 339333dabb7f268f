"""The formulas of divergences: terms, slopes, limits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iwopd.algo.divergences import DIVERGENCES, DivergenceKind, support_divergence
from written_divergences import KINDS, draw, written_out

SIZE = 40
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.mix}")


@every_kind
def test_terms_and_slopes_are_those_of_the_written_formula(kind: DivergenceKind) -> None:
    logits = draw(5, SIZE).requires_grad_()
    log_p, log_q = logits.log_softmax(-1), draw(5, SIZE, seed=1).log_softmax(-1)
    values, slopes = kind.terms(log_p.detach(), log_q)
    exact = written_out(kind, log_p, log_q)
    torch.testing.assert_close(values.sum(-1), exact.detach())
    (gradient,) = torch.autograd.grad(exact.sum(), logits)
    torch.testing.assert_close(slopes - log_p.detach().exp() * slopes.sum(-1, keepdim=True), gradient)


@every_kind
def test_equal_distributions_have_no_divergence_and_no_slope(kind: DivergenceKind) -> None:
    log_p = (8 * draw(5, SIZE)).log_softmax(-1)
    values, slopes = kind.terms(log_p, log_p.clone())
    assert float(values.sum(-1).abs().max()) < 1e-14
    assert float(slopes.abs().max()) < 1e-14


@every_kind
@given(seed=st.integers(0, 10_000), scale=st.floats(0.0, 30.0), size=st.integers(1, 50))
def test_a_divergence_is_not_negative_and_merging_outcomes_does_not_raise_it(
    kind: DivergenceKind, seed: int, scale: float, size: int
) -> None:
    log_p, log_q = ((scale * draw(size, seed=seed + i)).log_softmax(-1) for i in (0, 1))
    whole = float(kind.terms(log_p, log_q).values.sum())
    assert whole >= -1e-12
    kept = size // 2
    parts = [part for one in (log_p, log_q) for part in (one[:kept], one[kept:].logsumexp(-1))]
    merged = float(support_divergence(*parts, torch.ones(kept, dtype=torch.bool), kind=kind))
    assert -1e-12 <= merged <= whole + 1e-12


@pytest.mark.parametrize(("name", "plain"), [("skew-reverse-kl", "reverse-kl"), ("skew-forward-kl", "forward-kl")])
def test_without_skew_it_is_the_plain_divergence_exactly(name: str, plain: str) -> None:
    log_p, log_q = (draw(5, SIZE, seed=seed).log_softmax(-1) for seed in (0, 1))
    for one, other in zip(
        DivergenceKind(name, 0.0).terms(log_p, log_q), DivergenceKind(plain).terms(log_p, log_q), strict=True
    ):
        assert torch.equal(one, other)
    near = DivergenceKind(name, 1e-9).terms(log_p, log_q).values.sum(-1)
    torch.testing.assert_close(near, DivergenceKind(plain).terms(log_p, log_q).values.sum(-1))


def test_near_its_ends_jsd_is_a_small_multiple_of_the_kl_that_it_is_at_the_end() -> None:
    log_p, log_q = (draw(5, SIZE, seed=seed).log_softmax(-1) for seed in (0, 1))
    for end, near, name in ((0.0, 1e-6, "forward-kl"), (1.0, 1 - 1e-6, "reverse-kl")):
        plain = DivergenceKind(name).terms(log_p, log_q).values.sum(-1)
        assert torch.equal(DivergenceKind("jsd", end).terms(log_p, log_q).values.sum(-1), plain)
        torch.testing.assert_close(
            DivergenceKind("jsd", near).terms(log_p, log_q).values.sum(-1) / 1e-6, plain, rtol=1e-4, atol=0
        )


@every_kind
def test_impossible_outcomes_give_numbers(kind: DivergenceKind) -> None:
    log_p, log_q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]]).log()
    values, slopes = kind.terms(log_p, log_q)
    assert bool(torch.isfinite(torch.stack([values, slopes])).all())
    assert float(values[3].abs() + slopes[3].abs()) < 1e-40
    assert float(values.sum()) > 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reverse-lk",), "unknown divergence 'reverse-lk'; did you mean 'reverse-kl'.* choices: reverse-kl, forward-kl, jsd"),
        (("jsd", 1.5), r"beta of divergence 'jsd' must lie in \[0, 1\], got 1.5; the default is 0.5"),
        (("jsd", -0.1), r"beta .* got -0.1"),
        (("jsd", float("nan")), r"beta .* got nan"),
        (("skew-forward-kl", 1.0), r"alpha of divergence 'skew-forward-kl' must lie in \[0, 1\), got 1.0; the default is 0.1"),
        (
            ("forward-kl", 0.3),
            "'forward-kl' has no mixture, got 0.3: leave it out, or use jsd, skew-reverse-kl, skew-forward-kl",
        ),
    ],
)
def test_bad_kinds_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DivergenceKind(*arguments)


def test_a_mixture_that_is_not_given_is_the_default() -> None:
    for name, formula in DIVERGENCES.items():
        assert DivergenceKind(name).mix == (formula.default if formula.parameter else None)

"""Advantages that bound or centre the gap: numbers worked out by hand, limits, bounds, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd.algo.advantages import ADVANTAGES
from iwopd.algo.asking import Asked
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import make_objective
from iwopd.algo.top_k import top_k_kl
from iwopd.algo.views import Wanted
from support import length_mask, poison, random_batch

SHAPED: list[tuple[str, dict[str, Any]]] = [
    ("power", {}),
    ("power", {"power": 0.1}),
    ("baseline", {}),
    ("clipped", {}),
    ("clipped", {"low": -5.0, "high": 5.0}),
    ("log-mix", {}),
    ("log-mix", {"alpha": 0.5, "future": True}),
]
logprobs = st.floats(-80.0, 0.0)


def advantages(
    name: str, teacher: Tensor, old: Tensor, mask: Tensor | None = None, kl: Tensor | None = None, **params: Any
) -> Tensor:
    """[B, T] of an advantage under uniform weights."""
    mask = torch.ones_like(teacher, dtype=torch.bool) if mask is None else mask
    evidence = Evidence(teacher, old, mask, kl=kl)
    return ADVANTAGES[name].weighted(evidence, torch.ones_like(teacher), params)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


TEACHER, OLD = row(math.log(0.5), math.log(0.9), math.log(0.01), math.log(0.2)), row(*map(math.log, (0.25, 0.9, 0.8, 0.1)))


def test_power_by_hand() -> None:
    wanted = row(0.5**2 - 0.25**2, 0.0, 0.01**2 - 0.8**2, 0.2**2 - 0.1**2)
    torch.testing.assert_close(advantages("power", TEACHER, OLD, power=2.0), wanted, rtol=1e-13, atol=1e-15)
    fifth = row(0.5**5 - 0.25**5, 0.0, 0.01**5 - 0.8**5, 0.2**5 - 0.1**5)
    torch.testing.assert_close(advantages("power", TEACHER, OLD), fifth, rtol=1e-13, atol=1e-15)


def test_power_tends_to_the_scaled_gap() -> None:
    torch.testing.assert_close(advantages("power", TEACHER, OLD, power=1e-9) / 1e-9, TEACHER - OLD, rtol=1e-8, atol=1e-8)


@given(logprobs, logprobs, st.floats(0.01, 20.0))
def test_power_is_bounded_and_has_the_sign_of_the_gap(teacher: float, old: float, power: float) -> None:
    found = float(advantages("power", row(teacher), row(old), power=power))
    assert -1.0 <= found <= 1.0
    assert found == 0.0 or (found > 0) == (teacher > old)


def test_power_survives_an_impossible_token() -> None:
    assert advantages("power", row(-torch.inf), row(math.log(0.5)), power=1.0).item() == pytest.approx(-0.5)
    assert advantages("power", row(0.0), row(-3000.0)).item() == 1.0


def test_clipped_by_hand() -> None:
    gap = row(-9.0, -2.6, -2.5, 0.0, 7.0)
    bound = math.log(0.1) / 0.9
    assert bound == pytest.approx(-2.558, abs=1e-3)
    assert advantages("clipped", gap, torch.zeros_like(gap)).tolist() == [[bound, bound, -2.5, 0.0, 7.0]]
    assert advantages("clipped", gap, torch.zeros_like(gap), low=-5.0, high=5.0).tolist() == [[-5.0, -2.6, -2.5, 0.0, 5.0]]
    assert advantages("clipped", gap, torch.zeros_like(gap), low=-math.inf).tolist() == gap.tolist()


def test_log_mix_by_hand() -> None:
    """Ratios 2, 1, 1/80 and 2."""
    wanted = [math.log(0.1 * ratio + 0.9) for ratio in (2.0, 1.0, 1 / 80, 2.0)]
    torch.testing.assert_close(advantages("log-mix", TEACHER, OLD), row(*wanted), rtol=1e-13, atol=1e-15)
    later = [sum(wanted[place + 1 :]) / (3 - place) if place < 3 else 0.0 for place in range(4)]
    future = row(*(now + then for now, then in zip(wanted, later, strict=True)))
    torch.testing.assert_close(advantages("log-mix", TEACHER, OLD, future=True), future, rtol=1e-12, atol=1e-14)


def test_log_mix_looks_at_the_tokens_of_the_rollout_only() -> None:
    mask = length_mask([4, 2], width=6)
    teacher, old = (poison(torch.nn.functional.pad(values.expand(2, 4), (0, 2)), mask) for values in (TEACHER, OLD))
    found = advantages("log-mix", teacher, old, mask, future=True)
    torch.testing.assert_close(found[:1, :4], advantages("log-mix", TEACHER, OLD, future=True))
    torch.testing.assert_close(found[1:, :2], advantages("log-mix", TEACHER[:, :2], OLD[:, :2], future=True))


@given(st.lists(logprobs, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_log_mix_with_alpha_one_is_opd_exactly(values: list[float], random: Any) -> None:
    teacher, old = row(*values), row(*(random.uniform(-80.0, 0.0) for _ in values))
    assert torch.equal(advantages("log-mix", teacher, old, alpha=1.0), teacher - old)
    assert torch.equal(advantages("log-mix", teacher.float(), old.float(), alpha=1.0), teacher.float() - old.float())


@given(logprobs, logprobs, st.floats(0.001, 0.999))
def test_log_mix_lies_between_its_floor_and_the_gap(teacher: float, old: float, alpha: float) -> None:
    found, gap = float(advantages("log-mix", row(teacher), row(old), alpha=alpha)), teacher - old
    assert math.isfinite(found)
    assert found >= math.log1p(-alpha) - 1e-12
    assert abs(found) <= abs(gap) + 1e-12


def distributions(rows: int = 3, size: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ours, theirs = (2 * torch.randn(rows, size, dtype=torch.float64, generator=generator) for _ in range(2))
    return ours.log_softmax(-1), theirs.log_softmax(-1)


def test_baseline_has_no_mean_under_the_student() -> None:
    """Every possible token instead of a sample: rows are contexts, columns are tokens."""
    ours, theirs = distributions()
    kl = (ours.exp() * (ours - theirs)).sum(-1, keepdim=True)
    found = advantages("baseline", theirs, ours, kl=kl.expand_as(ours))
    assert float((ours.exp() * (theirs - ours)).sum(-1).abs().min()) > 0.1
    torch.testing.assert_close((ours.exp() * found).sum(-1), torch.zeros(3, dtype=torch.float64), atol=1e-14, rtol=0)
    torch.testing.assert_close(found, theirs - ours + kl)


def test_baseline_does_not_change_the_expected_gradient_and_a_kl_alone_has_none() -> None:
    """The trap: a KL that is the same for every token, used as an advantage of the sampled one, teaches nothing."""
    ours, theirs = distributions()
    kl = (ours.exp() * (ours - theirs)).sum(-1, keepdim=True).expand_as(ours)
    logits = ours.clone().requires_grad_()
    live = logits.log_softmax(-1)

    def expected(values: Tensor) -> Tensor:
        return torch.autograd.grad((ours.exp() * values * live).sum(), logits, retain_graph=True)[0]

    plain = expected(theirs - ours)
    assert float(plain.abs().max()) > 0.1
    torch.testing.assert_close(expected(advantages("baseline", theirs, ours, kl=kl)), plain)
    torch.testing.assert_close(expected(-kl), torch.zeros_like(plain), atol=1e-14, rtol=0)
    top = ours.topk(3).indices
    top_kl = top_k_kl(ours.gather(1, top), theirs.gather(1, top))[:, None].expand_as(ours)
    torch.testing.assert_close(expected(-top_kl), torch.zeros_like(plain), atol=1e-14, rtol=0)
    exact = torch.autograd.grad((live.exp() * (live - theirs)).sum(), logits)[0]  # what must be done instead
    torch.testing.assert_close(exact, -plain)


def test_the_kl_of_a_few_ids_is_that_of_renormalised_distributions() -> None:
    ours, theirs = torch.tensor([[0.5, 0.3]]).double().log(), torch.tensor([[0.1, 0.4]]).double().log()
    wanted = 5 / 8 * math.log(5 / 8 / (1 / 5)) + 3 / 8 * math.log(3 / 8 / (4 / 5))
    assert float(top_k_kl(ours, theirs)) == pytest.approx(wanted)
    assert float(top_k_kl(ours[:, :1], theirs[:, :1])) == 0.0
    assert math.isfinite(float(top_k_kl(ours, torch.tensor([[-torch.inf, -0.1]]).double())))


@pytest.mark.parametrize(("name", "params"), SHAPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_detached_zero_outside_and_weighted_once(name: str, params: dict[str, Any], dtype: torch.dtype) -> None:
    batch = random_batch([5, 0, 3], dtype=dtype)
    mask = batch["mask"]
    teacher, old = (batch[key].requires_grad_() for key in ("teacher_logprobs", "old_logprobs"))
    kl = poison(torch.rand(mask.shape, dtype=dtype), mask)
    plain = advantages(name, teacher, old, mask, kl, **params)
    assert plain.dtype == dtype
    assert not plain.requires_grad
    assert not plain[~mask].any()
    assert torch.isfinite(plain).all()
    made = make_objective({"advantage": name, **params, "weights": "linear-decay"})
    signal = made.signal(Evidence(teacher, old, mask, kl=kl))
    assert torch.equal(signal.advantages, plain * signal.weights)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"advantage": "power", "power": 0.0}, "power must be positive and finite, got 0.0"),
        ({"advantage": "power", "power": math.inf}, "power must be positive and finite, got inf"),
        ({"advantage": "baseline", "k": 1}, "k must be 0 .* or at least 2, got 1"),
        ({"advantage": "baseline", "k": -3}, "k must"),
        ({"advantage": "clipped", "low": 0.5}, "low must not be positive"),
        ({"advantage": "clipped", "high": -1.0}, "high must not be negative"),
        ({"advantage": "clipped", "low": math.nan}, "low must"),
        ({"advantage": "log-mix", "alpha": 0.0}, r"alpha must lie in \(0, 1\], got 0.0"),
        ({"advantage": "log-mix", "alpha": 1.5}, r"alpha must lie in \(0, 1\], got 1.5"),
        (
            {"advantage": "log-mix", "scale": 1.5},
            "scale is not used by .* advantage 'log-mix': it belongs to advantage 'exopd'",
        ),
    ],
)
def test_wrong_parameters_are_refused_in_words(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_objective(section)


def test_what_each_asks_for() -> None:
    def asks(section: dict[str, Any]) -> Asked:
        return make_objective(section).asks

    for name in ("opd", "power", "clipped", "log-mix"):
        assert not asks({"advantage": name}).teacher.names
        assert not asks({"advantage": name}).student.names
    whole, top = asks({"advantage": "baseline"}), asks({"advantage": "baseline", "k": 20})
    assert whole.student.names == whole.teacher.names == {"states"}
    assert (top.student, top.teacher) == (Wanted(top_k=20), Wanted(chosen=True))
    assert top.student_first
    with pytest.raises(ValueError, match="advantage 'baseline' needs kl"):
        advantages("baseline", TEACHER, OLD)

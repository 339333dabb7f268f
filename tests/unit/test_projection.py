"""Propositions 1 and 2 of the paper, checked numerically on spaces that can be enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from iwopd.algo import projection
from support import length_mask


def distributions(outcomes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two distributions over the same outcomes, as logs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, outcomes, generator=generator, dtype=torch.float64) * 1.5
    student, teacher = logits.log_softmax(-1)
    return student, teacher


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_proposition_1_against_a_generic_constrained_optimiser(seed: int, share: float) -> None:
    """Min KL(q || teacher) subject to KL(q || student) <= rho, handed to SLSQP without telling it the answer."""
    student, teacher = distributions(6, seed)
    rho = share * float(projection.divergence(teacher, student))
    alpha = projection.alpha_from_budget(student, teacher, rho)
    ours = projection.projected_policy(student, teacher, alpha).exp().numpy()
    log_student, log_teacher = student.numpy(), teacher.numpy()

    def kl(q: np.ndarray, log_p: np.ndarray) -> float:
        return float(np.sum(q * (np.log(q) - log_p)))

    def slope(q: np.ndarray, log_p: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(q) - log_p + 1)

    found = scipy.optimize.minimize(
        lambda q: kl(q, log_teacher),
        jac=lambda q: slope(q, log_teacher),
        x0=np.full(6, 1 / 6),
        method="SLSQP",
        bounds=[(1e-9, 1.0)] * 6,
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1, "jac": np.ones_like},
            {"type": "ineq", "fun": lambda q: rho - kl(q, log_student), "jac": lambda q: -slope(q, log_student)},
        ],
        options={"ftol": 1e-13, "maxiter": 1000},
    )
    assert found.success, found.message
    assert found.x == pytest.approx(ours, abs=1e-5)
    assert kl(ours, log_teacher) <= found.fun + 1e-9


@given(st.integers(0, 1000), st.floats(0.001, 0.999))
def test_the_budget_is_the_divergence_from_the_student(seed: int, alpha: float) -> None:
    student, teacher = distributions(9, seed)
    q = projection.projected_policy(student, teacher, alpha)
    assert float(q.exp().sum()) == pytest.approx(1.0)
    rho = projection.budget(student, teacher, alpha)
    assert float(rho) == pytest.approx(float(projection.divergence(q, student)), abs=1e-12)
    # rho(alpha) = alpha * psi'(alpha) - psi(alpha), with the derivative taken by autograd.
    variable = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    psi = torch.logsumexp((1 - variable) * student + variable * teacher, dim=-1)
    (slope,) = torch.autograd.grad(psi, variable)
    assert float(rho) == pytest.approx(float(alpha * slope - psi.detach()), abs=1e-12)


@given(st.integers(0, 1000), st.floats(0.001, 0.999))
def test_the_projected_objective_is_the_budget_plus_the_mean_log_ratio(seed: int, alpha: float) -> None:
    """Eq. 10: KL(q* || pi_T) = rho + E_q log(pi_theta / pi_T)."""
    student, teacher = distributions(9, seed)
    q = projection.projected_policy(student, teacher, alpha)
    mean = float((q.exp() * (student - teacher)).sum())
    rho = float(projection.budget(student, teacher, alpha))
    assert float(projection.divergence(q, teacher)) == pytest.approx(rho + mean, abs=1e-12)


@given(st.integers(0, 1000), st.floats(0.001, 0.999))
def test_a_mean_under_the_projected_policy_is_a_weighted_mean_under_the_student(seed: int, alpha: float) -> None:
    """Eq. 40, and with the log ratio as its function Eq. 42, whose left side must be the KL to the *teacher*, less rho."""
    student, teacher = distributions(9, seed)
    q = projection.projected_policy(student, teacher, alpha)
    weights = (alpha * (teacher - student)).exp() / projection.log_partition(student, teacher, alpha).exp()
    anything = torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for function in (anything, student - teacher):
        assert float((q.exp() * function).sum()) == pytest.approx(float((student.exp() * weights * function).sum()), abs=1e-12)
    weighted = float((student.exp() * weights * (student - teacher)).sum())
    rho = float(projection.budget(student, teacher, alpha))
    assert float(projection.divergence(q, teacher)) - rho == pytest.approx(weighted, abs=1e-12)
    assert float(projection.divergence(q, student)) - rho == pytest.approx(0.0, abs=1e-12)  # as printed, it is nothing


@given(st.integers(0, 1000), st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_the_budget_rises_with_alpha_and_can_be_inverted(seed: int, alpha: float, step: float) -> None:
    student, teacher = distributions(7, seed)
    rho, more = (float(projection.budget(student, teacher, a)) for a in (alpha, alpha + step))
    assert more > rho
    assert projection.alpha_from_budget(student, teacher, rho) == pytest.approx(alpha, abs=1e-6)


def test_the_ends_are_student_and_teacher() -> None:
    student, teacher = distributions(7, 0)
    torch.testing.assert_close(projection.projected_policy(student, teacher, 0.0), student)
    torch.testing.assert_close(projection.projected_policy(student, teacher, 1.0), teacher)
    whole = float(projection.divergence(teacher, student))
    assert float(projection.budget(student, teacher, 1.0)) == pytest.approx(whole)
    assert projection.alpha_from_budget(student, teacher, 0.0) == 0.0
    assert projection.alpha_from_budget(student, teacher, whole * 2) == 1.0
    with pytest.raises(ValueError, match=r"rho must not be negative, got -0.1"):
        projection.alpha_from_budget(student, teacher, -0.1)


class Tree:
    """Two autoregressive models over a vocabulary of 3 whose id 0 ends a sequence, all sequences up to 4 tokens."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.sequences: list[tuple[int, ...]] = []
        for length in range(1, 5):
            for ids in itertools.product(range(3), repeat=length):
                ended = ids[-1] == 0 or length == 4
                if ended and 0 not in ids[:-1]:
                    self.sequences.append(ids)
        for ids in self.sequences:
            for t in range(len(ids)):
                if ids[:t] not in self.tables:
                    logits = torch.randn(2, 3, generator=generator, dtype=torch.float64) * 1.2
                    self.tables[ids[:t]] = logits.log_softmax(-1)
        self.mask = length_mask([len(ids) for ids in self.sequences])
        self.student, self.teacher = torch.zeros(2, *self.mask.shape, dtype=torch.float64)
        for row, ids in enumerate(self.sequences):
            for t, token in enumerate(ids):
                self.student[row, t], self.teacher[row, t] = self.tables[ids[:t]][:, token]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0])
def test_proposition_2_prefix_normaliser_by_summing_over_prefixes(alpha: float) -> None:
    """`Z_{alpha,t}` summed over distinct prefixes instead of whole sequences."""
    tree = Tree(0)
    assert float(tree.student.sum(-1).exp().sum()) == pytest.approx(1.0)  # the space is complete
    log_z = projection.prefix_log_normalizer(tree.student, tree.teacher, tree.mask, alpha)
    for t in range(4):
        prefixes = {ids[:t] for ids in tree.sequences if len(ids) > t}
        total = reach = 0.0
        for prefix in prefixes:
            both = sum((tree.tables[prefix[:k]][:, prefix[k]] for k in range(t)), torch.zeros(2, dtype=torch.float64))
            student, teacher = both.tolist()
            total += np.exp(student) * np.exp(alpha * (teacher - student))
            reach += np.exp(student)
        assert float(log_z[t]) == pytest.approx(np.log(total / reach))
    weights = projection.prefix_weights(tree.student, tree.teacher, tree.mask, alpha)
    # Weights average to one over the student's prefixes at every position.
    probability = tree.student.sum(-1, keepdim=True).exp() * tree.mask
    torch.testing.assert_close((weights * probability).sum(0) / probability.sum(0), torch.ones(4, dtype=torch.float64))
    assert weights[:, 0].unique().numel() == 1  # r_1 = 1: the empty prefix


def test_the_divergence_of_sequences_is_the_sum_of_local_ones() -> None:
    """Eq. 51: the chain rule of the reverse KL."""
    tree = Tree(4)
    student, teacher = tree.student.sum(-1), tree.teacher.sum(-1)
    whole = float(projection.divergence(student, teacher))
    local = 0.0
    for prefix, (log_p, log_q) in tree.tables.items():
        rows = [i for i, ids in enumerate(tree.sequences) if ids[: len(prefix)] == prefix and len(ids) > len(prefix)]
        local += float(student[rows].exp().sum()) * float(projection.divergence(log_p, log_q))
    assert whole == pytest.approx(local, abs=1e-12)


def test_with_alpha_one_the_prefix_weight_is_the_change_of_measure() -> None:
    """E_student[r_t f(y_<t)] = E_teacher[f(y_<t)] for any f: here the indicator of each prefix of length 2."""
    tree = Tree(1)
    gap = tree.teacher - tree.student
    ratio = (gap.cumsum(-1) - gap).exp()[:, 2]
    student, teacher = tree.student.sum(-1).exp(), tree.teacher.sum(-1).exp()
    for prefix in {ids[:2] for ids in tree.sequences if len(ids) > 2}:
        rows = [row for row, ids in enumerate(tree.sequences) if ids[:2] == prefix and len(ids) > 2]
        assert float((student[rows] * ratio[rows]).sum()) == pytest.approx(float(teacher[rows].sum()))


@settings(max_examples=5)
@given(st.integers(0, 100))
def test_the_rule_ideal_estimates_the_prefix_weights(seed: int) -> None:
    """On a batch in which every sequence occurs as often as the student would write it, it is exact up to sampling."""
    tree = Tree(2)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(tree.student.sum(-1).exp(), 200_000, replacement=True, generator=generator)
    mask, gap = tree.mask[rows], (tree.teacher - tree.student)[rows]
    estimate = algo.token_weights("ideal", gap, mask, alpha=0.5)
    exact = projection.prefix_weights(tree.student, tree.teacher, tree.mask, 0.5)[rows]
    torch.testing.assert_close(estimate, exact, rtol=0.03, atol=0.0)


def test_the_weighted_semi_gradient_is_the_weighted_sum_of_local_gradients() -> None:
    """Eq. 12 by enumeration: E_y sum_t w_t A_t grad log pi(y_t) = -sum_prefixes pi(prefix) w(prefix) grad KL(prefix).

    The left side goes through `policy_loss` on all sequences at once; weights are the prefix weights of Proposition 2,
    which depend on the prefix alone, as the semi-gradient needs.
    """
    tree = Tree(3)
    prefixes = list(tree.tables)
    logits = torch.stack([tree.tables[prefix][0] for prefix in prefixes]).requires_grad_()
    teacher = torch.stack([tree.tables[prefix][1] for prefix in prefixes])
    student = logits.log_softmax(-1)
    place = {prefix: row for row, prefix in enumerate(prefixes)}

    logprobs = torch.zeros_like(tree.student)
    for row, ids in enumerate(tree.sequences):
        for t, token in enumerate(ids):
            logprobs[row, t] = student[place[ids[:t]], token]
    weights = projection.prefix_weights(tree.student, tree.teacher, tree.mask, 0.3)
    gap = algo.opd_advantages(tree.teacher, tree.student, tree.mask)
    probability = tree.student.sum(-1, keepdim=True).exp()
    loss = algo.policy_loss(logprobs, logprobs.detach(), gap * weights * probability, tree.mask, denominator=1).loss
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)

    exact = torch.zeros(())
    for prefix, row in place.items():
        rows = [i for i, ids in enumerate(tree.sequences) if ids[: len(prefix)] == prefix and len(ids) > len(prefix)]
        reach = float(probability[rows].sum())
        weight = float(weights[rows[0], len(prefix)])
        local = (student[row].exp() * (student[row] - teacher[row])).sum()
        exact = exact + reach * weight * local
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(ours, expected)

"""Weight rules of related papers: numbers worked out by hand, bounds, and what happens without evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import FURTHER, Evidence, prepare
from iwopd.algo.objectives import make_objective
from iwopd.algo.weights import WEIGHT_RULES, rule_weights
from iwopd.config import ConfigError, make_config
from support import length_mask, poison

FED: list[tuple[str, dict[str, Any]]] = [
    ("teacher-entropy", {}),
    ("teacher-entropy", {"tau": 0.3, "base": 0.0, "boost": 2.0}),
    ("tip", {}),
    ("tip", {"ratio": 0.2}),
    ("prune", {}),
    ("prune", {"k": 4, "threshold": 0.9, "drop": 0.3, "base": 0.0}),
    ("scope", {}),
    ("scope", {"tau": 0.2}),
]
"""Rules that ask for more than log-probs."""


def weights(name: str, mask: Tensor, gap: Tensor | None = None, **more: Any) -> Tensor:
    """Of a rule, from the evidence and the parameters that are given."""
    gap = torch.zeros(mask.shape, dtype=torch.float64) if gap is None else gap
    return algo.token_weights(name, gap, mask, **more)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A mask and all evidence [B, T], rubbish outside the mask."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    mask = length_mask(lengths, width=max(lengths) + draw(st.integers(0, 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def rand(scale: float) -> Tensor:
        return scale * torch.rand(mask.shape, generator=generator)

    def per_row(choices: list[float]) -> Tensor:
        values = draw(st.lists(st.sampled_from(choices), min_size=len(mask), max_size=len(mask)))
        return torch.tensor(values)[:, None].expand(mask.shape)

    found = {
        "student_entropy": rand(2.0),
        "teacher_entropy": rand(2.0),
        "kl": rand(3.0),
        "top_overlap": (rand(16.0)).floor() / 16,
        "correct": per_row([0.0, 1.0, math.nan]),
        "prompt": per_row([0.0, 1.0]),
    }
    assert found.keys() == FURTHER.keys()
    logprobs = {"teacher_logprobs": -rand(5.0), "old_logprobs": -rand(2.0)}
    return mask, {name: poison(values, mask) for name, values in (found | logprobs).items()}


@pytest.mark.parametrize(("name", "params"), FED)
@settings(max_examples=30)
@given(batch=batches(), order=st.randoms(use_true_random=False))
def test_finite_not_negative_zero_outside_and_the_same_in_any_order(
    name: str, params: dict[str, Any], batch: tuple[Tensor, dict[str, Tensor]], order: Any
) -> None:
    mask, given_evidence = batch
    rows = list(range(len(mask)))

    def found(rows: list[int]) -> Tensor:
        evidence = Evidence(mask=mask[rows], **{key: values[rows] for key, values in given_evidence.items()})
        return rule_weights(WEIGHT_RULES[name], evidence, params)

    plain = found(rows)
    assert torch.isfinite(plain).all()
    assert (plain >= 0).all()
    assert not plain[~mask].any()
    assert not plain.requires_grad
    order.shuffle(rows)
    torch.testing.assert_close(found(rows), plain[rows])
    if not WEIGHT_RULES[name].batch_dependent:
        for one in range(len(mask)):
            assert torch.equal(found([one])[0], plain[one])


def test_teacher_entropy_by_hand() -> None:
    entropy, mask = row(0.1, 0.8, 0.81, 3.0), length_mask([4])
    assert weights("teacher-entropy", mask, teacher_entropy=entropy).tolist() == [[1.0, 1.0, 2.0, 2.0]]
    gate = weights("teacher-entropy", mask, teacher_entropy=entropy, tau=0.05, base=0.0, boost=1.0)
    assert gate.tolist() == [[1.0, 1.0, 1.0, 1.0]]


def test_tip_by_hand() -> None:
    """Entropies 0, 1, 2 become h = 0, 1/2, 1; KLs 0, 3 become d = 0, 1: s is 0.5, 1, 0, 0.5 and 1."""
    mask = length_mask([3, 2], width=3)
    entropy = poison(torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]]), mask)
    kl = poison(torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 0.0]]), mask)

    def kept(ratio: float) -> list[list[float]]:
        return weights("tip", mask, student_entropy=entropy, kl=kl, ratio=ratio).tolist()

    assert kept(0.5) == [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    assert kept(0.3) == [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    assert kept(1.0) == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


def test_tip_joins_both_by_a_soft_or_and_takes_the_earlier_of_equals() -> None:
    mask = length_mask([5])
    entropy, kl = row(0.0, 0.5, 0.9, 0.0, 1.0), row(0.0, 0.5, 0.0, 0.7, 1.0)  # s: 0, 0.75, 0.9, 0.7, 1
    for count, places in ((1, [4]), (2, [2, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4])):
        found = weights("tip", mask, student_entropy=entropy, kl=kl, ratio=count / 5)
        assert found[0].nonzero().flatten().tolist() == places
    same = torch.full((1, 5), 0.3)
    assert weights("tip", mask, student_entropy=same, kl=same, ratio=0.4).tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0]]


def test_one_huge_entropy_does_not_hide_the_others() -> None:
    """Of 100 tokens the 98th entropy is the largest that counts."""
    mask = length_mask([100])
    entropy, kl = torch.linspace(0.0, 0.99, 100)[None].clone(), torch.zeros(1, 100)
    kl[0, 0] = 1.0
    entropy[0, -1] = 1e6
    found = weights("tip", mask, student_entropy=entropy, kl=kl, ratio=0.04)
    assert found[0].nonzero().flatten().tolist() == [0, 97, 98, 99]


def test_only_the_tokens_that_tip_keeps_are_in_the_denominator() -> None:
    mask = length_mask([6, 3])
    evidence = Evidence(torch.zeros(2, 6), -torch.rand(2, 6), mask, student_entropy=torch.rand(2, 6), kl=torch.rand(2, 6))
    signal = make_objective({"weights": "tip", "params": {"ratio": 0.5}}).signal(evidence)
    assert signal.supervised.sum(-1).tolist() == [3, 2]
    assert torch.equal(signal.supervised, signal.weights > 0)
    assert not signal.advantages[~signal.supervised].any()
    scaled = make_objective({"weights": "tip", "params": {"ratio": 0.5, "normalize": "mean-one"}}).signal(evidence)
    assert torch.equal(scaled.supervised, signal.supervised)
    with pytest.raises(ValueError, match="'tip' supervises the tokens with a positive weight: pass its weights"):
        algo.supervised_mask("tip", mask)


def test_prune_by_hand() -> None:
    overlap, mask = row(1.0, 0.5, 0.75, 0.25, 0.0, 0.0), length_mask([5], width=6)
    found = weights("prune", mask, top_overlap=overlap, k=4, threshold=0.7, drop=0.4, base=0.5)
    torch.testing.assert_close(found, row(1.5, 1.1, 1.1, 0.7, 0.5, 0.0))
    default = weights("prune", mask, top_overlap=overlap)
    torch.testing.assert_close(default, row(1.5, 1.49, 1.49, 1.48, 1.47, 0.0))


def test_prune_counts_ids_and_not_rounded_shares() -> None:
    """7 of 10 ids in float32 are a little less than 0.7."""
    share = torch.full((1, 1), 7.0) / 10
    assert float(share.double()) < 0.7
    assert weights("prune", length_mask([1]), top_overlap=share, k=10, threshold=0.7, drop=1.0, base=0.0).item() == 1.0
    assert weights("prune", length_mask([1]), top_overlap=share, k=10, threshold=0.71, drop=1.0, base=0.0).item() == 0.0


@given(batches())
def test_pruned_weights_never_rise(batch: tuple[Tensor, dict[str, Tensor]]) -> None:
    mask, evidence = batch
    found = weights("prune", mask, top_overlap=evidence["top_overlap"], drop=0.1)
    for one, length in zip(found, mask.sum(-1).tolist(), strict=True):
        assert (one[:length].diff() <= 0).all()
        assert (one[:length] >= 0.5).all()
        assert (one[:length] <= 1.5).all()


def test_sod_by_hand() -> None:
    """Segments of two tokens with mean |a| of 1, 4, 0.5 and 0: 1, 1/4, 2 and a million, of which 1.5 are allowed."""
    gap, mask = row(-1.5, 0.5, 4.0, -4.0, 0.25, -0.75, 0.0), length_mask([7])
    found = weights("sod", mask, gap, tokens=2)
    torch.testing.assert_close(found, row(1.0, 1.0, 0.25, 0.25, 1.5, 1.5, 1.5), rtol=1e-5, atol=0)
    assert weights("sod", mask, gap).tolist() == [[1.0] * 7]  # one segment
    free = weights("sod", mask, gap, tokens=2, delta=9.0)
    assert float(free[0, 4]) == pytest.approx(1.000001 / 0.500001)


def test_rising_by_hand_and_against_iw_opd() -> None:
    mask = length_mask([4, 1])
    found = weights("rising", mask)
    wanted = [0.25 + 0.75 / (1 + math.exp(-((place + 0.5) / 4 - 0.3) / 0.1)) for place in range(4)]
    torch.testing.assert_close(found[0], torch.tensor(wanted, dtype=torch.float64))
    assert float(found[1, 0]) == pytest.approx(0.25 + 0.75 / (1 + math.exp(-2.0)))
    long = length_mask([50])
    assert (weights("rising", long).diff() > 0).all()
    assert (weights("cumulative-share", long, torch.ones(1, 50)).diff() <= 0).all()


def scope(verdicts: list[float], prompts: list[int], ours: list[float], theirs: list[float], **params: Any) -> list[float]:
    """Weights of rollouts of two tokens each with these mean log-probs."""
    mask = length_mask([2] * len(verdicts))

    def spread(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None].expand(mask.shape)

    jitter = torch.tensor([0.25, -0.25], dtype=torch.float64)
    logprobs = {"old_logprobs": spread(ours) + jitter, "teacher_logprobs": spread(theirs) - jitter}
    found = weights("scope", mask, correct=spread(verdicts), prompt=spread(prompts), **logprobs, **params)
    assert torch.equal(found[:, 0], found[:, 1])
    return [float(value) for value in found[:, 0]]


def test_scope_by_hand() -> None:
    """Prompt 0: two right (student perplexities e and e^3), two wrong (teacher's e^2 and e); prompt 1: one of each."""
    found = scope([1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1], [-1, -9, -3, -9, -2, -9], [-9, -2, -9, -1, -9, -5])
    total = math.e + math.e**3
    right = [2 * math.e / total, 2 * math.e**3 / total]
    wrong = [2 * math.exp(-2) / (math.exp(-2) + math.exp(-1)), 2 * math.exp(-1) / (math.exp(-2) + math.exp(-1))]
    assert found == pytest.approx([right[0], wrong[0], right[1], wrong[1], 1.0, 1.0])
    assert scope([1, 1], [0, 0], [-1, -3], [0, 0], tau=2.0) == pytest.approx([2 / (1 + math.e), 2 * math.e / (1 + math.e)])


def test_scope_gives_one_where_nobody_judged() -> None:
    nan = math.nan
    assert scope([1, nan, 1], [0, 0, 0], [-1, -50, -1], [0, 0, 0]) == [1.0, 1.0, 1.0]
    assert scope([nan, nan], [0, 0], [-1, -3], [-1, -3]) == [1.0, 1.0]


def test_verdicts_may_be_missing_and_nothing_else() -> None:
    mask, values = length_mask([2], width=3), torch.tensor([[math.nan, 1.0, math.inf]])
    ready = prepare({"mask": mask, "correct": values})["correct"]
    assert ready.isnan().tolist() == [[True, False, False]]
    assert ready[0, 1:].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="kl is nan at row 0, token 0"):
        prepare({"mask": mask, "kl": values})
    with pytest.raises(ValueError, match=r"correct must lie in \[0, 1\], got 1.5"):
        prepare({"mask": mask, "correct": values + 0.5})


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 5), (2, 3)])
def test_batches_without_tokens(shape: tuple[int, int]) -> None:
    mask, nothing = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for name, params in FED:
        evidence = Evidence(nothing, nothing, mask, **dict.fromkeys(FURTHER, nothing))
        assert not rule_weights(WEIGHT_RULES[name], evidence, params).any()


@pytest.mark.parametrize(
    ("rule", "params", "words"),
    [
        ("teacher-entropy", {"tau": -1.0}, "tau must be finite and not negative, got -1.0"),
        ("teacher-entropy", {"boost": math.inf}, "boost must be finite"),
        ("tip", {"ratio": 1.5}, r"ratio must lie in \(0, 1\], got 1.5"),
        ("tip", {"k": -1}, "k must not be negative, got -1"),
        ("prune", {"k": 0}, "top_overlap needs a parameter k"),
        ("prune", {"threshold": 1.5}, r"threshold must lie in \[0, 1\]"),
        ("prune", {"drop": -0.1}, "drop must be finite and not negative"),
        ("sod", {"tokens": 0}, "tokens must be at least 1, got 0"),
        ("sod", {"delta": -1.0}, "delta must be finite and not negative"),
        ("rising", {"floor": 2.0}, r"floor must lie in \[0, 1\]"),
        ("rising", {"width": 0.0}, "width must be positive"),
        ("scope", {"tau": 0.0}, "tau must be positive"),
    ],
)
def test_wrong_parameters_are_refused_in_words(rule: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_objective({"weights": rule, "params": params})


def test_what_each_asks_for() -> None:
    def names(rule: str, **params: Any) -> tuple[frozenset[str], frozenset[str]]:
        asks = make_objective({"weights": rule, "params": params}).asks
        return asks.student.names, asks.teacher.names

    nothing: frozenset[str] = frozenset()
    assert names("teacher-entropy") == (nothing, frozenset({"entropy"}))
    assert names("tip") == (frozenset({"entropy", "states"}), frozenset({"states"}))
    assert names("tip", k=20) == (frozenset({"entropy", "top-k"}), frozenset({"chosen"}))
    assert names("prune") == (frozenset({"top-k"}), frozenset({"top-k"}))
    for rule in ("sod", "rising", "scope"):
        assert names(rule) == (nothing, nothing)


def test_one_kl_for_all_who_ask() -> None:
    both = {"advantage": "baseline", "weights": "tip"}
    assert make_objective({**both, "k": 8, "params": {"k": 8}}).kl_k == 8
    with pytest.raises(
        ValueError, match=r"kl is computed once, .* 'tip' with k = 0 and advantage 'baseline' with k = 8: give both"
    ):
        make_objective({**both, "k": 8})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": {"weights": "tip", "params": {"ratio": 0}}}, r"ratio must lie in \(0, 1\], got 0"),
        ({"method": {"weights": "teacher-entropy", "params": {"base": 0, "boost": 0}}}, "base and boost are both 0"),
        (
            {"method": {"weights": "scope"}, "reward": {"checker": "tiny", "normalize": "none"}},
            "compares the rollouts of a prompt, but rollout.samples is 1, so all weights would be 1",
        ),
    ],
)
def test_settings_that_would_teach_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"models": {"world": "clean"}, **settings})


def test_a_rule_that_needs_verdicts_is_refused_where_nobody_judges() -> None:
    with pytest.raises(ConfigError, match=r"weights = 'scope' asks which rollouts are right.*set reward.checker"):
        make_config({"models": {"world": "clean"}, "method": {"weights": "scope"}, "rollout": {"samples": 2}})

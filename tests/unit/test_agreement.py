"""Agreement of gradients before and after drifts: against autograd, whatever splits or weighs the batch; and its rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from iwopd.algo.agreement import DECAY, WIDEST, GradientParts, RunningMean, _signs, split
from iwopd.algo.drift_weights import LEAST, SLOPE, TRACE, gate
from iwopd.algo.gradients import cosine
from iwopd.algo.objectives import make_objective
from iwopd.config import Optim
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import Learner
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.train.state import TrainingState
from iwopd.types import Prompt, Rollout, ScoredRollout, StepStats, TokenBatch
from models import make_model
from support import length_mask, poison

VOCAB = 21


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_parts_are_gradients_by_a_linear_map_behind_the_states() -> None:
    """Autograd by a map that is inserted where it changes nothing."""
    hidden, weight, teacher = drawn(11, 6).double(), drawn(VOCAB, 6, seed=1).double(), drawn(11, VOCAB, seed=2).double()
    before = torch.rand(11, generator=torch.Generator().manual_seed(3)).double()
    sides = (before, 1.0 - before)

    def losses(states: Tensor) -> Tensor:
        p, q = (states @ weight.t()).log_softmax(-1), teacher.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    one = torch.eye(6, dtype=torch.float64, requires_grad=True)
    expected = [torch.autograd.grad((side * losses(hidden @ one.t())).sum(), one)[0] for side in sides]
    leaf = hidden.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(losses(leaf).sum(), leaf)
    parts = GradientParts.of(hidden, slopes, *sides)
    torch.testing.assert_close(parts.sums.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert parts.agreement == pytest.approx(cosine([expected[0]], [expected[1]]), abs=1e-6)
    some, rest = slice(0, 4), slice(4, 11)
    halves = [GradientParts.of(hidden[here], slopes[here], *(side[here] for side in sides)) for here in (some, rest)]
    torch.testing.assert_close(GradientParts.merge(halves).sums, parts.sums, rtol=1e-5, atol=1e-6)


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate([9, 3, 14, 1, 9]):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, VOCAB, (2 + number,), generator=generator).tolist()))
        made.append(Rollout(prompt, torch.randint(1, VOCAB, (length,), generator=generator), torch.zeros(length), "length"))
    return made


def updated(method: dict[str, Any], **optim: Any) -> float:
    """The agreement of one update of a fresh student."""
    student, items = make_model("qwen3"), rollouts()
    theirs = LocalScorer(make_model("llama", seed=5), vocab_size=VOCAB)
    objective = make_objective(method)
    teacher = Distributions.of(theirs) if objective.needs_teacher_distribution else None
    lm = ResponseModel(student, vocab_size=VOCAB)
    learner = Learner(lm, Optim(lr=1e-9, **optim), objective, Ranks(), teacher)
    old = LocalScorer(student, vocab_size=VOCAB).score(items)
    rows = zip(items, old, theirs.score(items), strict=True)
    batch = TokenBatch.collate([ScoredRollout(*scored) for scored in rows])
    columns = loss_columns(objective, batch, evidence_of(batch, progress=0.0, agreement=0.2))
    found = learner.update(batch, columns, seed=0, step=1).agreement
    assert found is not None
    return found


KL = {"objective": "divergence"}


@pytest.mark.parametrize("method", [KL, {}], ids=["kl", "sampled"])
def test_micro_batches_change_nothing(method: dict[str, Any]) -> None:
    whole = updated(method, token_budget=10_000)
    assert -1 < whole < 1
    assert updated(method, token_budget=20) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("objective", [KL, {}], ids=["kl", "sampled"])
def test_weights_are_divided_out(objective: dict[str, Any]) -> None:
    plain = updated(objective)
    for rule, params in (("survival", {}), ("gated", {}), ("gated", {"least": 0.9}), ("linear-decay", {"gamma": 4.0})):
        assert updated({**objective, "weights": rule, "params": params}) == pytest.approx(plain, abs=1e-4), rule
    assert updated({**objective, "weights": "until-drift"}) != pytest.approx(plain, abs=1e-4)  # what it leaves out is unknown


def test_wide_states_are_projected_alike_everywhere() -> None:
    count, width = 400, WIDEST + 200
    hidden, slopes = drawn(count, width), drawn(count, width, seed=1)
    hidden[:, :8] *= 12  # a few directions dominate, as in trained models
    slopes[:, :8] = 5 * hidden[:, 8:16] + slopes[:, :8]
    before = torch.linspace(1, 0, count)
    exact = [(slopes * side[:, None]).t() @ hidden for side in (before, 1 - before)]
    parts = GradientParts.of(hidden, slopes, before, 1 - before)
    assert parts.sums.shape == (2, WIDEST, WIDEST)
    assert parts.agreement == pytest.approx(cosine([exact[0]], [exact[1]]), abs=0.1)
    _signs.cache_clear()
    assert torch.equal(GradientParts.of(hidden, slopes, before, 1 - before).sums, parts.sums)
    torch.manual_seed(9)  # the signs are nobody's random numbers
    _signs.cache_clear()
    assert torch.equal(GradientParts.of(hidden, slopes, before, 1 - before).sums, parts.sums)


def test_the_split_by_hand() -> None:
    mask = length_mask([4, 2])
    gap = poison(torch.tensor([[-1.0, 0.5, -2.0, 0.0], [0.0, 3.0, 0.0, 0.0]]), mask)
    weights = poison(torch.tensor([[1.0, 2.0, 0.5, 0.0], [1.0, 1e-35, 0.0, 0.0]]), mask)
    supervised = mask & torch.tensor([[True, True, True, True], [False, True, True, True]])
    before, after = split(gap, mask, weights, supervised)
    s = math.exp(-1.0)
    torch.testing.assert_close(before, torch.tensor([[1.0, s / 2, 2 * s, 0.0], [0.0] * 4]))
    torch.testing.assert_close(after, torch.tensor([[0.0, (1 - s) / 2, 2 * (1 - s), 0.0], [0.0] * 4]))
    slower, _ = split(gap, mask, torch.ones_like(gap), mask, tau=2.0)
    assert float(slower[0, 1]) == pytest.approx(math.exp(-0.5))


def test_what_cannot_be_told_is_none_and_nothing_leaves_the_range() -> None:
    hidden, slopes, ones = drawn(5, 4), drawn(5, 4, seed=1), torch.ones(5)
    assert GradientParts.of(hidden, slopes, ones, torch.zeros(5)).agreement is None
    assert GradientParts.of(hidden[:0], slopes[:0], ones[:0], ones[:0]).agreement is None
    for rubbish in (math.nan, math.inf):
        assert GradientParts.of(torch.full_like(hidden, rubbish), slopes, ones, ones).agreement is None
    for seed in range(40):  # parts that are one another's multiples: a cosine of 1 up to rounding
        hidden, slopes = drawn(1, 2, seed=seed), drawn(1, 2, seed=seed + 100)
        for sign in (1.0, -1.0):
            found = GradientParts.of(hidden, slopes, 0.5 * ones[:1], sign * 0.5 * ones[:1]).agreement
            assert found is not None
            assert found == pytest.approx(sign, abs=1e-6)
            assert -1 <= found <= 1


def test_the_running_mean_forgets() -> None:
    mean = RunningMean()
    assert mean.mean == 0.0  # it begins with one 0, so that a single batch does not open a gate
    assert mean.add(None) == mean
    mean = mean.add(0.5)
    assert mean.mean == pytest.approx(0.5 / (1 + DECAY))
    mean = mean.add(-0.5).add(None)
    assert mean.mean == pytest.approx((0.5 * DECAY - 0.5) / (1 + DECAY + DECAY**2))
    for _ in range(200):
        mean = mean.add(0.25)
    assert mean.mean == pytest.approx(0.25)


def test_a_run_keeps_the_running_mean() -> None:
    state = TrainingState()
    assert state.agreement == 0.0
    for step, value in enumerate([0.4, math.nan, 0.2], start=1):
        metrics = {"update/skipped": 0, "tokens_written": 8, "prompts": 2, "gradient/agreement": value}
        state.finished(StepStats(step, 0.0, 0.0, 8, 2, False, {}, metrics))
    assert state.agreement == pytest.approx((0.9 * 0.4 + 0.2) / (1 + 0.9 + 0.81))


GAP = torch.tensor([[-0.5, 1.0, -2.5, 0.25, -3.0, 0.5], [-1.0, -1.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
MASK = length_mask([6, 3])


def test_until_drift_by_hand() -> None:
    gap = poison(GAP, MASK)
    assert algo.token_weights("until-drift", gap, MASK).tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    found = algo.token_weights("until-drift", gap, MASK, threshold=1.2)
    assert found.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert torch.equal(algo.supervised_mask("until-drift", MASK, weights=found), found > 0)
    with pytest.raises(ValueError, match="threshold"):
        algo.token_weights("until-drift", gap, MASK, threshold=-1.0)


def test_survival_share_by_hand() -> None:
    found = algo.token_weights("survival-share", poison(GAP, MASK), MASK, tau=2.0, gamma=3.0)
    lost, spent, total = [0.0, 0.5, 0.5, 3.0, 3.0, 6.0], [0.0, 0.5, 1.5, 4.0, 4.25, 7.25], 7.25
    expected = [math.exp(-d / 2) * (1 + 3 * (1 - s / total)) for d, s in zip(lost, spent, strict=True)]
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))
    expected = [4.0, math.exp(-0.5) * (1 + 3 * (1 - 1 / 2.5)), math.exp(-1.25)]
    torch.testing.assert_close(found[1, :3], torch.tensor(expected, dtype=torch.float64))
    assert not found[1, 3:].any()
    plain = algo.token_weights("survival", GAP, MASK, tau=2.0)
    assert torch.equal(algo.token_weights("survival-share", GAP, MASK, tau=2.0, gamma=0.0), plain)
    for params, words in (({"tau": 0.0}, "tau must be positive"), ({"gamma": -1.0}, "gamma")):
        with pytest.raises(ValueError, match=words):
            algo.token_weights("survival-share", GAP, MASK, **params)


def test_the_gate_goes_from_survival_to_uniform() -> None:
    survival, uniform = algo.token_weights("survival", GAP, MASK), algo.token_weights("uniform", GAP, MASK)

    def gated(agreement: float, **params: float) -> Tensor:
        return algo.token_weights("gated", GAP, MASK, agreement=agreement, **params)

    for low in (-1.0, 0.0, LEAST):
        torch.testing.assert_close(gated(low), survival, rtol=0, atol=TRACE)
        assert (gated(low)[MASK] >= TRACE).all()
    for high in (LEAST + 1 / SLOPE, 1.0):
        assert torch.equal(gated(high), uniform)
    torch.testing.assert_close(gated(LEAST + 0.1), algo.token_weights("survival", GAP, MASK, floor=0.5))
    torch.testing.assert_close(
        gated(0.5, least=0.25, slope=1.0, tau=2.0), algo.token_weights("survival", GAP, MASK, tau=2.0, floor=0.25)
    )


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_more_agreement_never_weighs_less(one: float, other: float) -> None:
    low, high = (algo.token_weights("gated", GAP, MASK, agreement=value) for value in sorted((one, other)))
    assert (low <= high).all()
    assert (low[MASK] > 0).all()
    assert (high <= 1).all()
    assert (low[:, 0] == 1).all()
    assert 0 <= gate(one) <= 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"slope": 0.0}, "slope must be positive"),
        ({"slope": math.inf}, "slope must be positive and finite"),
        ({"least": 1.5}, r"least must lie in \[-1, 1\], got 1.5"),
        ({"tau": -1.0}, "tau must be positive"),
        ({"agreement": 1.5}, r"agreement must lie in \[-1, 1\], got 1.5"),
        ({"agreement": math.nan}, "agreement must lie"),
        ({"floor": 0.1}, "has no parameter 'floor'"),
    ],
)
def test_what_the_gate_refuses(params: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        algo.token_weights("gated", GAP, MASK, **{"agreement": 0.0, **params})

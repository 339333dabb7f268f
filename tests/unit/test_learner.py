"""The update: the same with and without a forward pass ahead, padding, gradient checkpointing and several micro-batches."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from iwopd.algo.objectives import Objective, make_objective
from iwopd.config import Optim
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import ForwardPass, Learner
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import make_model


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate([9, 3, 14, 1, 9]):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, 21, (2 + number,), generator=generator).tolist()))
        made.append(Rollout(prompt, torch.randint(1, 21, (length,), generator=generator), torch.zeros(length), "length"))
    return made


class Result(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
    """By parameter, times 1 - beta1: AdamW's first moment after one step."""
    old_logprobs: list[Tensor]


def columns(objective: Objective, batch: TokenBatch) -> dict[str, Tensor]:
    return loss_columns(objective, batch, evidence_of(batch))


def updated(
    *, ahead: bool, obstacle: str | None = None, method: dict[str, Any] | None = None, kind: str = "qwen3", **optim: Any
) -> Result:
    """One update of a fresh model, with the old log-probs from a forward pass ahead of it or from a scorer."""
    model, items = make_model(kind), rollouts()
    lm = ResponseModel(model, vocab_size=21)
    lm.packing_obstacle = obstacle if obstacle is not None else lm.packing_obstacle
    objective = make_objective(method or {"weights": "cumulative-share"})
    learner = Learner(lm, Optim(lr=1e-9, grad_clip=1e9, **optim), objective, Ranks())
    forward = learner.forward(items) if ahead else None
    assert (forward is not None) == ahead
    old = [one.logprobs for one in forward.scores] if forward is not None else LocalScorer(model, vocab_size=21).score(items)
    teacher = LocalScorer(make_model("llama", seed=5), vocab_size=21).score(items)
    reference = LocalScorer(make_model(kind, seed=6), vocab_size=21).score(items)
    batch = TokenBatch.collate([ScoredRollout(*scored) for scored in zip(items, old, teacher, reference, strict=True)])
    update = learner.update(batch, columns(objective, batch), seed=0, step=1, forward=forward)
    assert update.updates == 1
    moments = {name: learner.optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return Result(update.loss, moments, old)


def assert_same(one: Result, other: Result) -> None:
    assert one.loss == pytest.approx(other.loss, abs=1e-5)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(gradient, other.gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    for first, second in zip(one.old_logprobs, other.old_logprobs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_the_forward_pass_may_be_made_ahead(kind: str) -> None:
    one, other = updated(ahead=True, kind=kind), updated(ahead=False, kind=kind, token_budget=20)
    assert any(gradient.abs().max() > 1e-4 for gradient in one.gradients.values())
    assert_same(one, other)


def test_padding_changes_nothing() -> None:
    assert_same(updated(ahead=True), updated(ahead=False, obstacle="switched off"))


def test_gradient_checkpointing_changes_nothing() -> None:
    assert_same(updated(ahead=True), updated(ahead=True, gradient_checkpointing=True))


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.1}, {"kl_coef": 0.2}])
def test_entropy_and_kl_terms_reach_the_gradient(settings: dict[str, float]) -> None:
    method = {"weights": "cumulative-share", **settings}
    plain, one, other = (
        updated(ahead=True),
        updated(ahead=True, method=method),
        updated(ahead=False, method=method, token_budget=20),
    )
    assert_same(one, other)
    assert max((one[1][name] - moment).abs().max() for name, moment in plain[1].items()) > 1e-4


@pytest.mark.parametrize("optim", [{"ppo_epochs": 2}, {"mini_batches": 2}, {"token_budget": 30}])
def test_several_updates_or_micro_batches_leave_the_old_logprobs_to_a_scorer(optim: dict[str, int]) -> None:
    lm = ResponseModel(make_model("qwen3"))
    learner = Learner(lm, Optim(**optim), make_objective({}), Ranks())
    assert learner.forward(rollouts()) is None


def scored(items: list[Rollout], old: list[Tensor]) -> TokenBatch:
    return TokenBatch.collate([ScoredRollout(item, lp, lp - 1.0) for item, lp in zip(items, old, strict=True)])


def test_a_pass_of_other_rollouts_is_refused() -> None:
    items, objective = rollouts(), make_objective({})
    learner = Learner(ResponseModel(make_model("qwen3")), Optim(), objective, Ranks())
    forward = learner.forward(items[:3])
    batch = scored(items, LocalScorer(learner.lm.model).score(items))
    with pytest.raises(ValueError, match=r"the forward pass has 26 tokens, the batch 36"):
        learner.update(batch, columns(objective, batch), seed=0, step=1, forward=forward)


def test_a_pass_is_let_go_of_when_there_is_nothing_to_learn() -> None:
    """A denominator of 0 leaves the update out; the graph of the waiting pass must not outlive the step."""
    items, objective = rollouts(), make_objective({})
    learner = Learner(ResponseModel(make_model("qwen3")), Optim(), objective, Ranks())

    def step() -> weakref.ref[ForwardPass]:
        forward = learner.forward(items)
        assert forward is not None
        batch = scored(items, [one.logprobs for one in forward.scores])
        nothing = {**columns(objective, batch), "supervised": torch.zeros(len(batch.response_ids), dtype=torch.bool)}
        assert learner.update(batch, nothing, seed=0, step=1, forward=forward).updates == 0
        return weakref.ref(forward)

    alive = step()
    gc.collect()
    assert alive() is None
    assert not [name for name, value in vars(learner).items() if isinstance(value, (Tensor, ForwardPass))]

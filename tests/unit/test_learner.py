"""The update: the same with and without a forward pass ahead, padding, gradient checkpointing and several micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from iwopd.algo.signal import training_signal
from iwopd.config import Method, Optim
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import Learner
from iwopd.train.ranks import Ranks
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


def updated(
    *, ahead: bool, obstacle: str | None = None, method: Method | None = None, kind: str = "qwen3", **optim: Any
) -> Result:
    """One update of a fresh model, with the old log-probs from a forward pass ahead of it or from a scorer."""
    model, items = make_model(kind), rollouts()
    lm = ResponseModel(model, vocab_size=21)
    lm.packing_obstacle = obstacle if obstacle is not None else lm.packing_obstacle
    method = method or Method(weights="cumulative-share")
    learner = Learner(lm, Optim(lr=1e-9, grad_clip=1e9, **optim), method, Accelerator(cpu=True), Ranks())
    old = learner.old_logprobs(items) if ahead else None
    assert (old is not None) == ahead
    old = old or LocalScorer(model, vocab_size=21).score(items)
    teacher = LocalScorer(make_model("llama", seed=5), vocab_size=21).score(items)
    reference = LocalScorer(make_model(kind, seed=6), vocab_size=21).score(items)
    batch = TokenBatch.collate([ScoredRollout(*scored) for scored in zip(items, old, teacher, reference, strict=True)])
    signal = training_signal(batch.teacher_logprobs, batch.old_logprobs, batch.mask, weights="cumulative-share")
    update = learner.update(batch, signal, seed=0, step=1)
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
    method = Method(weights="cumulative-share", **settings)
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
    learner = Learner(lm, Optim(**optim), Method(), Accelerator(cpu=True), Ranks())
    assert learner.old_logprobs(rollouts()) is None


def test_a_pass_that_was_made_for_other_rollouts_is_not_used() -> None:
    items = rollouts()
    lm = ResponseModel(make_model("qwen3"))
    learner = Learner(lm, Optim(), Method(), Accelerator(cpu=True), Ranks())
    learner.old_logprobs(items)
    changed = [Rollout(item.prompt, item.response_ids.flip(0), item.rollout_logprobs, "length") for item in items]
    old = LocalScorer(lm.model).score(changed)
    batch = TokenBatch.collate([ScoredRollout(item, lp, lp - 1.0) for item, lp in zip(changed, old, strict=True)])
    signal = training_signal(batch.teacher_logprobs, batch.old_logprobs, batch.mask, weights="uniform")
    update = learner.update(batch, signal, seed=0, step=1)
    assert float(update.stats.ratio_max) == pytest.approx(1.0, abs=1e-5)

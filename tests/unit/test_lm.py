"""Log-probs of responses through real transformers models."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd import lm as lm_module
from iwopd import own_head, packing
from iwopd.lm import ResponseModel, Sequences
from iwopd.packing import micro_batches, padding_waste
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout
from models import make_model


def rollouts(count: int, seed: int = 0) -> list[Rollout]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = rng.choice([0, 1, 2, 5, 9, 20, 40])
        prompt = Prompt(f"p{number}", tuple(rng.randrange(2, 21) for _ in range(rng.randint(1, 12))))
        made.append(Rollout(prompt, torch.randint(1, 21, (length,)), torch.zeros(length), "length"))
    return made


def by_hand(model: torch.nn.Module, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """One rollout at a time, from the model's own logits over the whole sequence."""
    ids = torch.cat([torch.tensor(rollout.prompt.token_ids), rollout.response_ids])
    with torch.no_grad():
        logprobs = (model(input_ids=ids[None]).logits[0, :, :21].double() / temperature).log_softmax(-1)
    first = len(rollout.prompt.token_ids)
    return logprobs[first - 1 : -1].gather(-1, ids[first:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("way", ["as it comes", "packed", "padded"])
def test_scores_are_those_of_one_rollout_at_a_time_whatever_the_batching(
    kind: str, temperature: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = way == "padded"
    if way != "as it comes":
        monkeypatch.setattr(ResponseModel, "_is_lean", lambda self: False)
    model, items = make_model(kind, vocab=24).eval(), rollouts(40)
    expected = [by_hand(model, item, temperature) for item in items]
    for budget in (1, 100, 100_000):
        scorer = LocalScorer(model, temperature=temperature, vocab_size=21, token_budget=budget)
        if padded:
            scorer.lm.packing_obstacle = "switched off"
        scores = scorer.score(items)
        assert scorer.lm.packing_obstacle == ("switched off" if padded else None)
        assert [len(score) for score in scores] == [len(item) for item in items]
        for score, want in zip(scores, expected, strict=True):
            torch.testing.assert_close(score.double(), want, rtol=1e-5, atol=1e-5)


def test_scoring_restores_the_mode_and_takes_no_gradient() -> None:
    model = make_model("qwen3").train()
    scores = LocalScorer(model).score(rollouts(5))
    assert model.training
    assert not any(score.requires_grad for score in scores)


def test_gradients_through_the_head_are_the_models_own() -> None:
    items = [item for item in rollouts(12) if len(item)]
    gradients = []
    for fused in (True, False):
        model = make_model("qwen3")
        lm = ResponseModel(model, temperature=0.8, vocab_size=21)
        lm.fused = fused
        prompts = [torch.tensor(item.prompt.token_ids) for item in items]
        lm.logprobs(Sequences.build(prompts, [item.response_ids for item in items])).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-5)


def test_a_head_that_is_not_linear_is_found_out_and_the_models_own_logits_are_used() -> None:
    items = rollouts(8)
    prompts = [torch.tensor(item.prompt.token_ids) for item in items]
    sequences = Sequences.build(prompts, [item.response_ids for item in items])
    capped = make_model("gemma2").eval()
    lm = ResponseModel(capped, vocab_size=21)
    assert lm.check_head(sequences).difference > 1e-2
    assert not lm.fused
    assert lm.chunked
    for got, item in zip(sequences.split(lm.logprobs(sequences)), items, strict=True):
        torch.testing.assert_close(got.double(), by_hand(capped, item), rtol=1e-4, atol=1e-5)
    plain = ResponseModel(make_model("llama").eval(), vocab_size=21)
    assert plain.check_head(sequences).difference < 1e-5
    assert plain.fused


def test_own_logits_come_in_chunks_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with a cap, in chunks of two tokens, against whole sequences; never more logits at a time than that."""
    monkeypatch.setattr(own_head, "CHUNK_ELEMENTS", 2 * 24)
    items = [item for item in rollouts(6) if len(item)]
    prompts = [torch.tensor(item.prompt.token_ids) for item in items]
    sequences = Sequences.build(prompts, [item.response_ids for item in items])
    found = []
    for chunked in (True, False):
        model = make_model("gemma2", vocab=24)
        tokens: list[int] = []
        model.lm_head.register_forward_hook(lambda head, inputs, output, seen=tokens: seen.append(output.shape[1]))
        lm = ResponseModel(model, temperature=0.8, vocab_size=21)
        lm.fused, lm.chunked = False, chunked
        values = lm.logprobs(sequences)
        values.sum().backward()
        found.append((values.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
        assert (max(tokens) == 2) == chunked
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-4, atol=1e-5)


def transformed_head(kind: str) -> Any:
    """A model that does something to its states before the output layer reads them."""
    model = make_model(kind).eval()
    body = type(model).forward
    model.register_module("between", torch.nn.Linear(32, 32))

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        hook = self.lm_head.register_forward_pre_hook(lambda layer, inputs: (self.between(inputs[0]).tanh(),), prepend=True)
        try:
            return body(self, *arguments, **options)
        finally:
            hook.remove()

    model.forward = forward.__get__(model)
    return model


def without_its_layer(kind: str) -> Any:
    """A capped model that multiplies by its output matrix without calling the layer."""
    model = make_model(kind).eval()

    class Hidden(torch.nn.Module):
        def __init__(self, layer: torch.nn.Linear) -> None:
            super().__init__()
            self.weight = layer.weight

        def __call__(self, states: Tensor) -> Tensor:  # hooks are not asked
            return states @ self.weight.t()

    model.lm_head = Hidden(model.lm_head)
    return model


@pytest.mark.parametrize(("make", "chunked"), [(transformed_head, True), (without_its_layer, False)])
def test_a_head_of_another_kind_is_asked_for_its_own_logits(make: Any, chunked: bool) -> None:
    """A chunk of tokens at a time, or where that cannot be had, a whole sequence."""
    items = rollouts(4)
    model, sequences = make("gemma2"), Sequences.from_rollouts(items)
    lm = ResponseModel(model, vocab_size=21)
    found = lm.check_head(sequences)
    assert not lm.fused
    assert (lm.chunked, found.chunked) == (chunked, chunked)
    for got, item in zip(sequences.split(lm.logprobs(sequences)), items, strict=True):
        torch.testing.assert_close(got.double(), by_hand(model, item), rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(1, 3000))
def test_micro_batches_cover_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
    assert padding_waste(lengths, batches) <= 0.3


def test_padding_waste_is_small_on_varied_lengths() -> None:
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(128, 512) for _ in range(64)]
        assert padding_waste(lengths, micro_batches(lengths, 8192)) < 0.2
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        micro_batches([3], 0)


def test_the_head_is_checked_on_the_path_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores take the lean path, updates the model's own modules: a fault of either must be found."""
    items = rollouts(6)
    sequences = Sequences.from_rollouts(items)
    inputs = packing.packed_inputs

    def shifted(*arguments: Any) -> dict[str, Any]:
        found = inputs(*arguments)
        return {**found, "position_ids": found["position_ids"] * 2}

    lm = ResponseModel(make_model("qwen3").eval(), vocab_size=21)
    assert lm.packing_obstacle is None
    monkeypatch.setattr(lm_module, "packed_inputs", shifted)
    assert lm.check_head(sequences, trained=False).fused  # the lean path alone is right
    assert not lm.check_head(sequences).fused

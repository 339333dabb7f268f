"""Packed rows: the same hidden states and gradients as one sequence at a time, and a no from models that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from iwopd.lm import ResponseModel, Sequences
from iwopd.packing import ATTENTION, PackingError, attend, enable_packing, packed_batches, packed_inputs
from models import COMMON, make_model

LENGTHS = [7, 5, 5, 1, 12]


def ids_of(lengths: list[int], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 21, (length,), generator=generator) for length in lengths]


def run_packed(model: Any, rows: list[Tensor]) -> Tensor:
    inputs = packed_inputs(model, torch.cat(rows), torch.tensor([len(row) for row in rows]))
    states: Tensor = model.base_model(**inputs).last_hidden_state[0]
    return states


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_states_and_gradients_are_those_of_single_sequences(kind: str, checkpointing: bool) -> None:
    rows = ids_of(LENGTHS)
    results = []
    for packed in (True, False):
        model = make_model(kind).eval()
        if packed:
            assert enable_packing(model) is None
            if checkpointing:
                model.gradient_checkpointing_enable()
                model.train()
                for module in model.modules():
                    if isinstance(module, torch.nn.Dropout):
                        module.p = 0.0
            states = run_packed(model, rows)
        else:
            states = torch.cat([model.base_model(input_ids=row[None]).last_hidden_state[0] for row in rows])
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        results.append((states.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (states, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_model_that_was_made_ready_is_otherwise_what_it_was() -> None:
    rows = torch.stack(ids_of([6, 6]))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    model = make_model("llama").eval()
    before = model(input_ids=rows, attention_mask=mask).logits
    written = model.generate(input_ids=rows, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert enable_packing(model) is None
    assert model.config._attn_implementation == ATTENTION
    assert torch.equal(model(input_ids=rows, attention_mask=mask).logits[1], before[1])
    assert torch.equal(model.generate(input_ids=rows, attention_mask=mask, max_new_tokens=5, do_sample=False), written)
    assert ATTENTION not in str(model.config.to_dict())  # a saved model must load without this package
    assert enable_packing(model) is None


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 21,
    **COMMON,
}


class Leaky(torch.nn.Module):
    """Mixes neighbouring tokens: what a state-space or convolution layer does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
        return mixed


def leaky() -> Any:
    model = make_model("qwen3")
    model.model.layers[1].mlp = Leaky(model.model.layers[1].mlp)
    return model


@pytest.mark.parametrize(
    ("make", "obstacle"),
    [
        (lambda: make_model("gemma2"), "some of its layers do not have full attention"),
        (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)), "its attention has a window"),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=21, hidden_size=16, num_hidden_layers=1)),
            "does not let its attention",
        ),
        (leaky, "its hidden states differ by"),
    ],
)
def test_models_that_cannot_be_packed_say_why_and_are_padded(make: Any, obstacle: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    before = getattr(model.config, "_attn_implementation", None)
    lm = ResponseModel(model, vocab_size=21)
    lm.fused = True
    prompts, responses = ids_of([3, 5, 2]), ids_of([6, 11, 4], seed=2)
    sequences = Sequences.build(prompts, responses)
    got = sequences.split(lm.token_hidden(sequences))
    assert obstacle in str(lm.packing_obstacle)
    assert getattr(model.config, "_attn_implementation", None) == before
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = torch.cat([prompt, response[:-1]])[None]
        want = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
        torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"sliding_window": 8}, {"s_aux": torch.zeros(2)}])
def test_attention_that_is_more_than_causal_is_refused(option: dict[str, Any]) -> None:
    states, boundaries = torch.randn(1, 2, 6, 4), torch.tensor([0, 4, 6])
    with pytest.raises(PackingError, match=f"its attention has '{next(iter(option))}'"):
        attend(torch.nn.Module(), states, states, states, None, cu_seq_lens_q=boundaries, **option)


def test_attention_to_another_sequence_is_refused() -> None:
    states, boundaries = torch.randn(1, 2, 6, 4), torch.tensor([0, 4, 6])
    with pytest.raises(PackingError, match="not causal self-attention"):
        attend(torch.nn.Module(), states[:, :, :3], states, states, None, cu_seq_lens_q=boundaries)


def test_packed_batches_keep_to_the_budget() -> None:
    assert packed_batches([5, 9, 2, 40, 9], 20) == [[3], [1, 4], [0, 2]]
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        packed_batches([3], 0)

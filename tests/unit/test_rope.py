"""Rotary embeddings of every type: a rollout's log-probs are its own, alone, beside longer ones, and while it is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from iwopd.lean_model import lean_obstacle
from iwopd.lm import ResponseModel, Sequences
from iwopd.models import ModelError
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rope import fix_rope, follows_batch, rope_note
from iwopd.types import Prompt

VOCAB, ORIGINAL, LONGEST = 47, 16, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 3.0, 9.0, 20.0],
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.5},
}


def rope(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 100.0, **copy.deepcopy(TYPES[kind])}


def build(family: str, **options: Any) -> Any:
    torch.manual_seed(5)
    config_type = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_type)(**{**SHAPE, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def of_two_kinds(kind: str) -> Any:
    """A model whose kinds of layers have their own RoPE."""
    layers = {"sliding_attention": rope("default"), "full_attention": rope(kind)}
    options = {"head_dim": 8, "sliding_window": 2 * LONGEST, "query_pre_attn_scalar": 8}
    return build("Gemma3", layer_types=list(layers), rope_parameters=layers, **options)


def phi3() -> Any:
    return build("Phi3", rope_parameters=rope("longrope"), original_max_position_embeddings=ORIGINAL)


MODELS: dict[str, Any] = {
    **{kind: lambda kind=kind: build("Llama", rope_parameters=rope(kind)) for kind in TYPES},
    "dynamic": lambda: build("Llama", rope_parameters=rope("dynamic"), max_position_embeddings=ORIGINAL),
    "phi3": phi3,
    "by layer: longrope": lambda: of_two_kinds("longrope"),
}
"""A dynamic one changes beyond its context, where only scores can go."""


def tokens(count: int) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def own_logprobs(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    """From a forward pass over this sequence alone."""
    logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def test_all_types_are_here() -> None:
    assert set(TYPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_a_rollouts_own(name: str) -> None:
    """Of a short answer: alone, beside a longer one, packed, padded, and token by token while it is written."""
    model = MODELS[name]()
    fix_rope(model, LONGEST)
    pairs = [(tokens(3), tokens(6)), (tokens(5), tokens(LONGEST - 5)), (tokens(2), tokens(9))]
    alone = torch.cat([own_logprobs(model, *pair) for pair in pairs])
    sequences = Sequences.build([prompt for prompt, _ in pairs], [response for _, response in pairs])
    lm = ResponseModel(model)
    if "Gemma" not in type(model).__name__:
        assert lm.packing_obstacle is None
    scores = {"packed": lm.logprobs(sequences).detach()}  # with gradients: through the model's modules
    with torch.no_grad():
        scores["scored"] = lm.logprobs(sequences)  # without: on the lean path, if it has one
    lm.__dict__["packing_obstacle"] = "asked for"
    scores["padded"] = lm.logprobs(sequences).detach()
    for how, values in scores.items():
        torch.testing.assert_close(values, alone, atol=1e-4, rtol=0, msg=lambda text, how=how: f"{how}: {text}")
    prompts = [Prompt("short", tuple(tokens(3).tolist())), Prompt("long", tuple(tokens(5).tolist()))]
    for path in ("model",) if lean_obstacle(model) else ("model", "lean"):
        most = model.config.max_position_embeddings - 5
        sampler = LocalSampler(model, SamplingSettings(most), path=path)  # type: ignore[arg-type]
        for rollout in sampler.sample(prompts, seed=0, step=0, max_tokens=[8, most]):
            expected = own_logprobs(model, torch.tensor(rollout.prompt.token_ids), rollout.response_ids)
            torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=1e-4, rtol=0)


def test_a_llama_takes_the_lean_path_with_every_type_that_is_fixed() -> None:
    for kind in TYPES:
        model = build("Llama", rope_parameters=rope(kind))
        assert (lean_obstacle(model) is not None) == follows_batch(kind)
        fix_rope(model, LONGEST)
        assert lean_obstacle(model) is None


@torch.no_grad()
def test_without_it_a_neighbour_changes_the_scores() -> None:
    """What this is for: the first tokens of a row, beside a long row or a short one."""
    model = phi3()
    rows = torch.stack([torch.cat([tokens(8), torch.zeros(LONGEST - 8, dtype=torch.long)]), tokens(LONGEST)])

    def first_tokens() -> float:
        beside, alone = model(input_ids=rows).logits[0, :8], model(input_ids=rows[:1, :8]).logits[0]
        return float((beside.log_softmax(-1) - alone.log_softmax(-1)).abs().max())

    assert first_tokens() > 0.1
    fix_rope(model, LONGEST)
    assert first_tokens() < 1e-4


@pytest.mark.parametrize("longest", [ORIGINAL, ORIGINAL + 1])
@torch.no_grad()
def test_longrope_is_what_the_longest_sequence_would_have(longest: int) -> None:
    """Short factors up to the original length, long ones beyond, for all tokens."""
    model, plain = phi3(), phi3()
    note = fix_rope(model, longest)
    ids = tokens(longest)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5, rtol=0)
    which = "short" if longest == ORIGINAL else "long"
    assert note is not None
    assert f"longrope: the {which} factors for all lengths" in note
    assert note == rope_note(model.config, longest)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "phi3", "by layer: longrope"])
def test_what_is_saved_stays_as_it_was(name: str) -> None:
    model = MODELS[name]()
    config, names = copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    fix_rope(model, LONGEST)
    assert model.config.to_dict() == config
    assert list(model.state_dict()) == names


def test_a_second_choice_replaces_the_first() -> None:
    model = phi3()
    short, long = (fix_rope(model, longest) and model.model.rotary_emb.inv_freq.clone() for longest in (ORIGINAL, LONGEST))
    assert not torch.equal(short, long)
    fix_rope(model, ORIGINAL)
    assert torch.equal(model.model.rotary_emb.inv_freq, short)


def test_types_that_do_not_look_at_the_batch_are_left_alone() -> None:
    for kind in ("default", "linear", "yarn", "llama3", "proportional"):
        model = build("Llama", rope_parameters=rope(kind))
        before = model.model.rotary_emb.inv_freq.clone()
        assert fix_rope(model, LONGEST) is None
        assert torch.equal(model.model.rotary_emb.inv_freq, before)
        assert model.model.rotary_emb.rope_type == kind
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCAB))
    assert fix_rope(gpt2, LONGEST) is None


def test_what_still_looks_at_the_batch_is_refused_by_name() -> None:
    """Phi-3.5-MoE's rotary module does so by itself. Runs within its original length are all right."""
    parameters = {**rope("longrope"), "short_mscale": 1.0, "long_mscale": 1.3}
    model = build("Phimoe", rope_parameters=parameters, num_local_experts=2)
    with pytest.raises(ModelError, match=r"'model.rotary_emb', a PhimoeRotaryEmbedding, chooses its rotary frequencies"):
        fix_rope(model, LONGEST)
    assert "short factors" in (fix_rope(model, ORIGINAL) or "")


def test_an_unknown_rotary_module_is_refused() -> None:
    """Of a repository's own code: the config says that its frequencies follow the batch, and nothing here can fix them."""
    model = phi3()
    del model.model.rotary_emb.config
    del model.model.rotary_emb.inv_freq
    with pytest.raises(ModelError, match=r"Phi3ForCausalLM \(rope_type 'longrope', in modules that are unknown here\)"):
        fix_rope(model, LONGEST)

"""The lean decoder against the model's own forward, and who may use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from iwopd import lean_model
from iwopd.lean_model import lean_obstacle
from iwopd.lm import ResponseModel, Sequences
from iwopd.rollout import lean_decoder
from iwopd.rollout.lean_decoder import LeanDecoder
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.types import Prompt

transformers = pytest.importorskip("transformers")

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def build(family: str, **options: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a forgotten one
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-untied-biased": ("Qwen3", {"head_dim": 6, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-one-head": ("Llama", {"num_key_value_heads": 1}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}}),
    "yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "other-theta": ("Qwen3", {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "other-epsilon": ("Llama", {"rms_norm_eps": 0.1}),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """With several threads matrices are cut into blocks."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("copies", [True, False])
@torch.no_grad()
def test_logits_are_the_models_own(name: str, copies: bool, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of various lengths, of which some leave, some join, and all slide to the left of the cache; float32 to 1e-5."""
    if not copies:
        monkeypatch.setattr(lean_model, "COPY_BYTES", 0)
    monkeypatch.setattr(lean_decoder, "TENSOR_BYTES", 2**28 if copies else 0)  # one tensor for all layers, or one for each
    family, options = MODELS[name]
    model = build(family, **options)
    assert lean_obstacle(model) is None
    generator = torch.Generator().manual_seed(0)
    decoder = LeanDecoder(model, width=40)
    decoder.reserve(6, 41)
    for cache in (*decoder.keys, *decoder.values):
        cache.fill_(float("nan"))  # as memory may be that nobody has written
    assert (decoder.model.layers[0].down.matrices[0].dim() == 3) == (threads > 1)
    rows: list[tuple[list[int], list[torch.Tensor]]] = []  # ids under way, and the logits after each of the last ones

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    def check(ids: list[int], logits: list[torch.Tensor]) -> None:
        expected = model(torch.tensor([ids])).logits[0, -len(logits) :]
        torch.testing.assert_close(torch.stack(logits), expected, atol=1e-5, rtol=1e-5)

    def admit(sizes: list[int], source: list[int]) -> None:
        prompts = [tokens(size) for size in sizes]
        longest = max(sizes)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in prompts])
        logits = decoder.admit(ids, mask, torch.tensor(source))
        rows.extend((list(prompts[i]), [row]) for i, row in zip(source, logits, strict=True))

    def step(times: int) -> None:
        for _ in range(times):
            drawn = tokens(len(rows))
            for (ids, seen), token, row in zip(rows, drawn, decoder.step(torch.tensor(drawn)), strict=True):
                ids.append(token)
                seen.append(row)

    def select(order: list[int]) -> None:
        for place in set(range(len(rows))) - set(order):
            check(*rows[place])
        decoder.select(torch.tensor(order))
        rows[:] = [rows[i] for i in order]

    admit([9, 4, 9], [0, 1, 1, 2])
    step(5)
    select([0, 3, 2])
    admit([6, 1], [1, 0])
    step(12)
    select([4, 1, 3])
    step(3)
    select([0, 2])
    admit([5], [0, 0, 0])
    step(18)
    select([3])
    admit([3, 2], [0, 1])
    step(12)
    for row in rows:
        check(*row)
    decoder.clear()
    rows.clear()
    admit([2, 7], [0, 1])
    step(2)
    for row in rows:
        check(*row)


def test_cache_stays_within_its_width() -> None:
    """Rows that come and go for long do not make the cache grow."""
    model = build("Llama")
    settings = SamplingSettings(12, stop_ids=tuple(range(20)))
    prompts = [Prompt(str(i), (1 + i % 50,) * (1 + i % 9)) for i in range(150)]
    seen: list[int] = []  # columns

    class Watched(LeanDecoder):
        def step(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().step(ids)
            seen.append(self.store.last)
            return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iwopd.rollout.local.LeanDecoder", Watched)
        little = LocalSampler(model, settings, cache_tokens=21 * 6, path="lean").sample(prompts, seed=0, step=0)
    assert len(seen) > 40
    assert max(seen) == 21 + 21 // 8
    reference = LocalSampler(model, settings, path="model").sample(prompts, seed=0, step=0)
    assert [r.response_ids.tolist() for r in little] == [r.response_ids.tolist() for r in reference]


def test_admission_needs_room() -> None:
    decoder = LeanDecoder(build("Llama"), width=20)
    decoder.reserve(2, 20)
    ones = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="no room for 3 more rows beside 0"):
        decoder.admit(ones, ones.bool(), torch.tensor([0, 0, 0]))
    decoder.admit(ones, ones.bool(), torch.tensor([0]))
    with pytest.raises(ValueError, match="prompt of 4 tokens cannot join rows of 3"):
        decoder.admit(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool), torch.tensor([0]))


def with_hook(model: Any) -> Any:
    model.model.layers[1].register_forward_hook(lambda _module, _args, output: output)
    return model


def with_replaced_forward(model: Any) -> Any:
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = linear.forward
    return model


def with_adapter(model: Any) -> Any:
    class Adapted(nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj = Adapted(24, 24)
    return model


def with_mixed_dtypes(model: Any) -> Any:
    model.lm_head = nn.Linear(24, VOCAB, bias=False, dtype=torch.float64)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("Qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding window"),
        (lambda: build("Llama", rope_parameters=DYNAMIC), "type 'dynamic'"),
        (lambda: build("Llama", hidden_act="gelu"), "activation 'gelu'"),
        (lambda: build("Mistral"), "MistralForCausalLM is not one of"),
        (lambda: with_hook(build("Llama")), "hook"),
        (lambda: with_replaced_forward(build("Llama")), "replaced forward"),
        (lambda: with_adapter(build("Llama")), "is a Adapted"),
    ],
)
def test_obstacles_lead_to_the_models_own_forward(make: Any, reason: str) -> None:
    model = make()
    obstacle = lean_obstacle(model)
    assert obstacle is not None
    assert reason in obstacle
    prompts, settings = [Prompt("a", (1, 2)), Prompt("b", (3,))], SamplingSettings(6)
    with pytest.raises(ValueError, match="the lean path cannot run this model"):
        LocalSampler(model, settings, path="lean").sample(prompts, seed=0, step=0)
    fallback, own = (LocalSampler(model, settings, path=path).sample(prompts, seed=0, step=0) for path in ("auto", "model"))
    assert [r.response_ids.tolist() for r in fallback] == [r.response_ids.tolist() for r in own]


def test_mixed_dtypes_are_an_obstacle() -> None:
    assert "several dtypes" in (lean_obstacle(with_mixed_dtypes(build("Llama"))) or "")


def test_a_subclass_may_compute_anything() -> None:
    model = type("Own", (transformers.LlamaForCausalLM,), {})(transformers.LlamaConfig(**SHAPE))
    assert "Own is not one of" in (lean_obstacle(model) or "")


def test_auto_takes_the_lean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model's own forward ran")

    model = build("Qwen3", head_dim=8)
    monkeypatch.setattr(type(model), "forward", refuse)
    assert len(LocalSampler(model, SamplingSettings(4)).sample([Prompt("a", (1, 2))], seed=0, step=0)[0]) == 4


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of whole sequences, some of the same length, without the modules being called."""
    family, options = MODELS[name]
    model = build(family, **options)
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 5), (1, 1), (1, 7), (4, 4), (9, 1)]  # prompt, response
    prompts, responses = ([torch.randint(0, VOCAB, (pair[place],), generator=generator) for pair in sizes] for place in (0, 1))
    sequences = Sequences.build(prompts, responses)
    scored = ResponseModel(model)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(type(model.model), "forward", None)
        got = scored.token_hidden(sequences)
    want = [
        model.model(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=1e-5)
    assert not got.requires_grad
    assert scored.token_hidden(sequences).requires_grad  # with gradients: the model's own forward
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not scored._is_lean()


def test_rollouts_are_ordinary_tensors() -> None:
    """What is made in inference mode cannot be trained on: neither a rollout nor what a listener makes of it."""
    heard = []
    sampler = LocalSampler(build("Qwen3", head_dim=8), SamplingSettings(4))
    (rollout,) = sampler.sample(
        [Prompt("a", (1, 2))], seed=0, step=0, finished=lambda row, told: heard.append(told.rollout_logprobs + 1)
    )
    for tensor in (rollout.response_ids, rollout.rollout_logprobs, *heard):
        assert not tensor.is_inference()
    assert len(heard) == 1

"""The local sampler on tiny random models: against `generate`, against the model's own log-probs, and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.rollout import local
from iwopd.rollout.decoding import ModelDecoder
from iwopd.rollout.lean_decoder import LeanDecoder
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.types import Prompt, Rollout

transformers = pytest.importorskip("transformers")

VOCAB = 83
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.4,
}


def build(kind: str, **options: Any) -> Any:
    torch.manual_seed(7)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=160, initializer_range=0.4, **options
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, **options)).eval()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **options)).eval()
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, **{"head_dim": 8, **options})).eval()


def make_prompts(count: int, longest: int = 24) -> list[Prompt]:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    ids = [tuple(torch.randint(0, VOCAB, (size,), generator=generator).tolist()) for size in sizes]
    return [Prompt(f"p{i}", tokens) for i, tokens in enumerate(ids)]


def texts(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in rollouts]


def forward_logits(model: Any, rollout: Rollout) -> Tensor:
    """The model's own logits of each response token, without cache or padding."""
    prompt = rollout.prompt.token_ids
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([(*prompt, *rollout.response_ids.tolist())])).logits[0]
    return logits[len(prompt) - 1 : -1]


PATHS = [("qwen3", "lean"), ("qwen3", "model"), ("llama", "lean"), ("llama", "model"), ("gpt2", "model")]


@pytest.mark.parametrize(("kind", "path"), [*PATHS, ("mistral", "model")])
def test_greedy_is_generate(kind: str, path: Any) -> None:
    options = {"sliding_window": 9} if kind == "mistral" else {}
    model = build(kind, **options)
    prompts = make_prompts(24)
    stops = (3, 40, 61)
    settings = SamplingSettings(max_tokens=40, temperature=0, stop_ids=stops)
    rollouts = LocalSampler(model, settings, path=path).sample(prompts, seed=0, step=0)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([(0,) * (longest - len(prompt.token_ids)) + prompt.token_ids for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts])
    config = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=list(stops), pad_token_id=0)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, longest:]
    assert len({len(rollout) for rollout in rollouts}) > 3
    for row, rollout in zip(output.tolist(), rollouts, strict=True):
        assert rollout.response_ids.tolist() == row[: len(rollout)]
        assert all(token == 0 for token in row[len(rollout) :])
        assert rollout.stop_reason == ("eos" if row[len(rollout) - 1] in stops else "length")
        assert rollout.stop_reason == "eos" or len(rollout) == 40


@pytest.mark.parametrize(("kind", "path"), PATHS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}])
def test_samples_and_logprobs(kind: str, path: Any, options: dict[str, Any]) -> None:
    """Ids lie inside the top sets, answers end at the first stop id, log-probs are the model's own over all ids."""
    model = build(kind)
    settings = SamplingSettings(max_tokens=30, stop_ids=(5, 6), **options)
    rollouts = LocalSampler(model, settings, path=path).sample(make_prompts(12), seed=1, step=0, samples=2)
    assert {rollout.stop_reason for rollout in rollouts} == {"eos", "length"}
    for rollout in rollouts:
        logits = forward_logits(model, rollout) / settings.temperature
        expected = logits.log_softmax(-1).gather(1, rollout.response_ids[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=2e-5, rtol=1e-5)
        stops = [i for i, token in enumerate(rollout.response_ids.tolist()) if token in (5, 6)]
        assert stops == ([len(rollout) - 1] if rollout.stop_reason == "eos" else [])
        assert rollout.stop_reason == "eos" or len(rollout) == 30
        if settings.top_k:
            rank = (logits > logits.gather(1, rollout.response_ids[:, None])).sum(1)
            assert int(rank.max()) < 12


def test_order_and_samples() -> None:
    prompts = make_prompts(5)
    rollouts = LocalSampler(build("qwen3"), SamplingSettings(6)).sample(prompts, seed=0, step=0, samples=3)
    assert [(rollout.prompt.id, rollout.sample) for rollout in rollouts] == [(p.id, s) for p in prompts for s in range(3)]


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_batching_changes_nothing(kind: str, path: Any) -> None:
    """Hundreds of rollouts: all at once, with little room (rows join and leave), one prompt at a time, in another order."""
    model = build(kind)
    prompts = make_prompts(200 if path == "lean" else 50)
    settings = SamplingSettings(max_tokens=12, stop_ids=(5, 6, 7))
    sampler = LocalSampler(model, settings, path=path)
    reference = texts(sampler.sample(prompts, seed=3, step=9, samples=2))
    little = LocalSampler(model, settings, path=path, cache_tokens=20 * 36)
    again = texts(little.sample(prompts, seed=3, step=9, samples=2))
    assert sum(a == b for a, b in zip(again, reference, strict=True)) >= 0.999 * len(reference)
    assert texts(sampler.sample(prompts[::-1], seed=3, step=9))[::-1] == reference[::2]
    alone = LocalSampler(model, settings, path=path, cache_tokens=1)
    assert texts(alone.sample(prompts[:3], seed=3, step=9, samples=2)) == reference[:6]
    assert [texts(sampler.sample([p], seed=3, step=9))[0] for p in prompts[:3]] == reference[:6:2]


def test_paths_write_the_same() -> None:
    model, prompts = build("qwen3"), make_prompts(100)
    settings = SamplingSettings(max_tokens=16, temperature=0.9, top_p=0.95, stop_ids=(5, 6))
    lean, own = (LocalSampler(model, settings, path=path).sample(prompts, seed=0, step=1) for path in ("lean", "model"))
    assert texts(lean) == texts(own)


def test_noise_follows_seed_step_prompt_and_sample() -> None:
    prompts = [Prompt(f"p{i}", (1, 2, 3)) for i in range(20)]
    sampler = LocalSampler(build("qwen3"), SamplingSettings(12))

    def draw(seed: int, step: int) -> list[list[int]]:
        return texts(sampler.sample(prompts, seed=seed, step=step, samples=2))

    base = draw(0, 0)
    assert draw(0, 0) == base
    assert len({tuple(ids) for ids in [*base, *draw(1, 0), *draw(0, 1)]}) == 120


class Spy:
    """Counts the rows of every step and the prompts of every admission."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decoder: type[Any]) -> None:
        self.steps: list[int] = []
        self.admissions: list[tuple[int, int, int]] = []
        step, admit = decoder.step, decoder.admit

        def counted_step(instance: Any, ids: Tensor) -> Any:
            self.steps.append(len(ids))
            return step(instance, ids)

        def counted_admit(instance: Any, ids: Tensor, mask: Tensor, source: Tensor) -> Any:
            self.admissions.append((*ids.shape, len(source)))
            return admit(instance, ids, mask, source)

        monkeypatch.setattr(decoder, "step", counted_step)
        monkeypatch.setattr(decoder, "admit", counted_admit)


@pytest.mark.parametrize(("path", "decoder"), [("lean", LeanDecoder), ("model", ModelDecoder)])
def test_no_pass_and_no_row_is_wasted(path: Any, decoder: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = build("qwen3"), make_prompts(40)
    spy = Spy(monkeypatch, decoder)
    limits = [1 + (7 * i) % 32 for i in range(40)]
    settings = SamplingSettings(max_tokens=32)
    rollouts = LocalSampler(model, settings, path=path).sample(prompts, seed=0, step=0, samples=2, max_tokens=limits)
    assert [len(rollout) for rollout in rollouts[::2]] == limits
    assert spy.admissions == [(40, 24, 80)]  # every prompt once, for both of its samples
    assert sum(spy.steps) == sum(len(rollout) - 1 for rollout in rollouts)
    assert len(spy.steps) == 31

    spy.steps.clear()
    spy.admissions.clear()
    width = max(len(prompt.token_ids) + limit for prompt, limit in zip(prompts, limits, strict=True))
    little = LocalSampler(model, settings, path=path, cache_tokens=16 * width)
    again = little.sample(prompts, seed=0, step=0, samples=2, max_tokens=limits)
    assert texts(again) == texts(rollouts)
    assert max(spy.steps) <= 16
    assert sum(spy.steps) == sum(len(rollout) - 1 for rollout in rollouts)
    assert len(spy.admissions) > 5
    assert len(spy.steps) < 1.5 * sum(spy.steps) / 16 + 32  # waiting rows take the places of finished ones


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = build("qwen3"), make_prompts(30)
    settings = SamplingSettings(max_tokens=10)
    reference = {
        path: texts(LocalSampler(model, settings, path=path).sample(prompts, seed=0, step=0)) for path in ("lean", "model")
    }
    monkeypatch.setattr(local, "PREFILL_TOKENS", 50)
    for path, expected in reference.items():
        sampler = LocalSampler(model, settings, path=path)  # type: ignore[arg-type]
        assert texts(sampler.sample(prompts, seed=0, step=0)) == expected


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_ids_beyond_the_vocabulary_do_not_exist(kind: str, path: Any) -> None:
    model = build(kind)
    for settings in (SamplingSettings(20, temperature=2.0, stop_ids=(60,)), SamplingSettings(20, temperature=0)):
        rollouts = LocalSampler(model, settings, path=path, vocab_size=50).sample(make_prompts(40), seed=0, step=0)
        assert max(int(rollout.response_ids.max()) for rollout in rollouts) == 49
        assert all(rollout.stop_reason == "length" for rollout in rollouts)
        for rollout in rollouts[:3]:
            logits = forward_logits(model, rollout)[:, :50] / (settings.temperature or 1)
            expected = logits.log_softmax(-1).gather(1, rollout.response_ids[:, None]).squeeze(1)
            torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [4, 12])
def test_sliding_windows_run_in_waves(window: int) -> None:
    model = build("mistral", sliding_window=window)
    settings = SamplingSettings(20, stop_ids=(5, 6))
    prompts = make_prompts(30)
    reference = LocalSampler(model, settings).sample(prompts, seed=0, step=0)
    little = LocalSampler(model, settings, cache_tokens=300).sample(prompts, seed=0, step=0)
    assert texts(little) == texts(reference)
    for rollout in reference[:5]:
        expected = forward_logits(model, rollout).log_softmax(-1).gather(1, rollout.response_ids[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_mode_is_restored_and_dropout_off(kind: str, path: Any) -> None:
    options = {"resid_pdrop": 0.5, "attn_pdrop": 0.5} if kind == "gpt2" else {"attention_dropout": 0.5}
    model, prompts = build(kind, **options), make_prompts(10)
    sampler = LocalSampler(model, SamplingSettings(10), path=path)
    expected = texts(sampler.sample(prompts, seed=0, step=0))
    model.train()
    model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    assert texts(sampler.sample(prompts, seed=0, step=0)) == expected
    assert [module.training for module in model.modules()] == modes
    assert all(not rollout.rollout_logprobs.requires_grad for rollout in sampler.sample(prompts, seed=0, step=0))
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()  # the weights still train


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_weights_are_read_at_every_call(kind: str, path: Any) -> None:
    model, prompts = build(kind), make_prompts(10)
    sampler = LocalSampler(model, SamplingSettings(10, temperature=0), path=path)
    before = texts(sampler.sample(prompts, seed=0, step=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    after = texts(sampler.sample(prompts, seed=0, step=0))
    assert after != before
    assert after == texts(
        LocalSampler(model, SamplingSettings(10, temperature=0), path="model").sample(prompts, seed=0, step=0)
    )


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_bfloat16(kind: str, path: Any) -> None:
    torch._C._set_mkldnn_enabled(False)  # its bfloat16 products crash on some virtual CPUs
    try:
        model = build(kind).to(torch.bfloat16)
        rollouts = LocalSampler(model, SamplingSettings(10), path=path).sample(make_prompts(8), seed=0, step=0)
        for rollout in rollouts:
            assert rollout.rollout_logprobs.dtype == torch.float32
            expected = (
                forward_logits(model, rollout).float().log_softmax(-1).gather(1, rollout.response_ids[:, None]).squeeze(1)
            )
            assert float((rollout.rollout_logprobs - expected).abs().mean()) < 0.2
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_clear_errors() -> None:
    model, prompt = build("qwen3"), Prompt("long", (1,) * 150)
    sampler = LocalSampler(model, SamplingSettings(11))
    assert sampler.sample([], seed=0, step=0) == []
    with pytest.raises(ValueError, match=r"'long' has 150 tokens: with max_tokens 11 that is 161, .* is 160"):
        sampler.sample([prompt], seed=0, step=0)
    assert len(sampler.sample([prompt], seed=0, step=0, max_tokens=[10])[0]) == 10
    with pytest.raises(ValueError, match="has id 83; the model has 83 ids"):
        sampler.sample([Prompt("x", (1, 83))], seed=0, step=0)
    with pytest.raises(ValueError, match="2 limits for 1 prompts"):
        sampler.sample([prompt], seed=0, step=0, max_tokens=[1, 1])
    with pytest.raises(ValueError, match=r"max_tokens of 'long' is 12; it must lie in 1\.\.11"):
        sampler.sample([prompt], seed=0, step=0, max_tokens=[12])
    with pytest.raises(ValueError, match="samples must be >= 1"):
        sampler.sample([prompt], seed=0, step=0, samples=0)
    for options, message in (
        ({"vocab_size": 84}, "vocab_size is 84, the model has 83 ids"),
        ({"pad_id": 83}, "pad_id is 83"),
        ({"path": "fast"}, "path must be"),
        ({"cache_tokens": 0}, "cache_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            LocalSampler(model, SamplingSettings(8), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["lean", "model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(path: Any, temperature: float) -> None:
    model = build("qwen3")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.train()
    with pytest.raises(FloatingPointError, match=r"not finite at token 0 of an answer to prompt 'p\d'"):
        LocalSampler(model, SamplingSettings(8, temperature), path=path).sample(make_prompts(3), seed=0, step=0)
    assert model.training


@pytest.mark.parametrize("path", ["lean", "model"])
def test_a_listener_hears_of_finished_rollouts_while_others_are_written(path: Any) -> None:
    model, prompts = build("qwen3"), make_prompts(24)
    sampler = LocalSampler(model, SamplingSettings(max_tokens=60, stop_ids=(3, 40, 61)), path=path)
    silent = sampler.sample(prompts, seed=0, step=0, samples=2)
    steps, heard = [0], {}
    model_step = (LeanDecoder if path == "lean" else ModelDecoder).step

    def count(*arguments: Any) -> Tensor:
        steps[0] += 1
        return model_step(*arguments)

    def listen(place: int, rollout: Rollout) -> None:
        assert place not in heard
        heard[place] = (steps[0], rollout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeanDecoder if path == "lean" else ModelDecoder, "step", count)
        told = sampler.sample(prompts, seed=0, step=0, samples=2, finished=listen)
    assert texts(told) == texts(silent)
    assert [heard[place][1] for place in range(48)] == told
    shortest, longest = min(map(len, told)), max(map(len, told))
    assert min(step for step, _ in heard.values()) < longest / 2  # early ones were not kept back
    assert all(len(rollout) - 1 <= step for step, rollout in heard.values())
    assert shortest < longest


@pytest.mark.parametrize("cache_tokens", [None, 200])
def test_progress_counts_every_token_and_answer(cache_tokens: int | None) -> None:
    sampler = LocalSampler(build("qwen3"), SamplingSettings(12, stop_ids=set(range(20))), cache_tokens=cache_tokens)
    told: list[tuple[int, int]] = []
    quiet = sampler.sample(make_prompts(9), seed=0, step=0, samples=2)
    sampler.progress = lambda answers, tokens: told.append((answers, tokens))
    rollouts = sampler.sample(make_prompts(9), seed=0, step=0, samples=2)
    assert texts(rollouts) == texts(quiet)
    assert len({len(rollout) for rollout in rollouts}) > 2
    assert sum(answers for answers, _ in told) == len(rollouts) == 18
    assert sum(tokens for _, tokens in told) == sum(map(len, rollouts))
    assert len(told) >= 12  # while they are written, not at the end

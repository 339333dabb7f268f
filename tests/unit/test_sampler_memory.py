"""The sampler's memory, on a pretend accelerator that keeps books: the budget is kept at every moment, in every call.

There is no GPU here. The pretend one computes on the CPU and counts bytes as torch's caching allocator does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from iwopd.devices import free_bytes
from iwopd.rollout.decoding import ModelDecoder, WaveDecoder
from iwopd.rollout.lean_decoder import LeanDecoder
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.types import Prompt
from pretend_gpu import PretendGPU, pretend_gpu

PROMPT, ANSWER = 2, 16
"""One to eight, as the paper's 2,048 and 16,384."""
DECODERS: dict[str, type[Any]] = {"lean": LeanDecoder, "model": ModelDecoder, "window": WaveDecoder}
TOTAL = 2**27


def build(kind: str) -> Any:
    """A cache of 48 kB a token beside weights of 3 MB."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 512,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    if kind == "window":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=12)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()


class Rows:
    """Rows that every call lets be under way, and those that were, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed: list[int] = []
        self.steps: list[int] = []
        for decoder in DECODERS.values():
            monkeypatch.setattr(decoder, "reserve", self._noting(decoder.reserve, lambda rows, _: self.allowed.append(rows)))
            monkeypatch.setattr(decoder, "step", self._noting(decoder.step, lambda ids: self.steps.append(len(ids))))

    @staticmethod
    def _noting(method: Any, note: Any) -> Any:
        def noted(decoder: Any, *given: Any) -> Any:
            note(*given)
            return method(decoder, *given)

        return noted


def sampler_of(model: Any, kind: str, dtype: str | None = None) -> LocalSampler:
    return LocalSampler(model, SamplingSettings(ANSWER), path="lean" if kind == "lean" else "model", dtype=dtype)


def prompts_and_limits(count: int) -> tuple[list[Prompt], list[int]]:
    """Some answers end early, so that others take their places; most go to the end."""
    prompts = [Prompt(f"p{i}", tuple(1 + (i + j) % 30 for j in range(PROMPT - i % 2))) for i in range(count)]
    return prompts, [ANSWER if i % 4 else ANSWER // 2 + i % 5 for i in range(count)]


def peak_of(gpu: PretendGPU, sampler: LocalSampler, count: int) -> tuple[int, int]:
    """Bytes that a call takes at most, and its budget."""
    prompts, limits = prompts_and_limits(count)
    budget = int(0.5 * free_bytes(gpu.device))
    before = gpu.memory.allocated
    gpu.memory.reset_peak()
    sampler.sample(prompts, seed=0, step=0, max_tokens=limits)
    return gpu.memory.peak - before, budget


@pytest.mark.parametrize(("kind", "dtype"), [("lean", None), ("lean", "bfloat16"), ("model", None), ("window", None)])
def test_the_peak_stays_within_the_budget(kind: str, dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch)
    with pretend_gpu(TOTAL) as gpu:
        sampler = sampler_of(build(kind).to(gpu.device), kind, dtype)
        peak, budget = peak_of(gpu, sampler, 70 if dtype is None else 140)
    assert peak <= 1.1 * budget
    assert peak >= {"lean": 0.7, "model": 0.5, "window": 0.2}[kind] * budget  # and what there is, is used
    assert len(set(rows.steps)) > 2  # rows came and went


@pytest.mark.parametrize("kind", ["lean", "model"])
def test_the_budget_is_the_same_in_every_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts as taken what the allocator holds for later: after a call, as much as the whole cache."""
    rows = Rows(monkeypatch)
    with pretend_gpu(TOTAL) as gpu:
        sampler = sampler_of(build(kind).to(gpu.device), kind)
        sampler.settings = SamplingSettings(ANSWER, stop_ids=range(32))  # every answer is short, but might have been long
        for step in range(5):
            sampler.sample(prompts_and_limits(70)[0], seed=0, step=step)
        assert gpu.memory.reserved > 0.3 * TOTAL
    allowed = [count for count in rows.allowed if count]
    assert len(allowed) == 5
    assert len(set(allowed)) == 1
    assert 10 < allowed[0] < 70

"""Sampler, scorer and attention on the device, against the CPU."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any, Literal

import pytest
import torch

from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.train.doctor.gpu import flash
from iwopd.types import Prompt, Rollout
from models import make_model

CPU = torch.device("cpu")
LOGPROB = 1e-4
"""Largest difference of a log-prob in float32."""
HALF = 5e-2
"""Mean difference under bfloat16 autocast."""


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [Prompt(f"p{n}", tuple(torch.randint(2, 21, (2 + n % 7,), generator=generator).tolist())) for n in range(12)]


def written(model: Any, path: Literal["lean", "model"], cache_tokens: int | None = None) -> list[Rollout]:
    sampler = LocalSampler(model, SamplingSettings(24, stop_ids={1}), vocab_size=21, path=path, cache_tokens=cache_tokens)
    return sampler.sample(prompts(), seed=0, step=1, samples=2)


@pytest.mark.parametrize("path", ["lean", "model"])
def test_the_sampler_writes_the_cpus_rollouts(device: torch.device, path: Literal["lean", "model"]) -> None:
    model = make_model("qwen3", vocab=24).eval()
    expected, found = written(model, path), written(model.to(device), path, cache_tokens=200)
    same = [torch.equal(one.response_ids, other.response_ids) for one, other in zip(expected, found, strict=True)]
    assert sum(same) >= len(same) - 1  # rounding may move a draw that lies between two ids
    for one, other, equal in zip(expected, found, same, strict=True):
        if equal:
            assert float((one.rollout_logprobs - other.rollout_logprobs).abs().max()) < LOGPROB


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2"])
def test_the_scorer_agrees_with_the_cpu(device: torch.device, kind: str) -> None:
    rollouts = written(make_model("qwen3", vocab=24).eval(), "lean")
    model = make_model(kind, vocab=24)
    expected = torch.cat(LocalScorer(model, vocab_size=21).score(rollouts))
    model.to(device)
    found = torch.cat(LocalScorer(model, vocab_size=21, token_budget=200).score(rollouts))
    if kind != "gemma2":  # whose soft cap the head check finds in a run
        assert float((found - expected).abs().max()) < LOGPROB
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    half = torch.cat(LocalScorer(model, vocab_size=21, autocast=autocast).score(rollouts))
    assert 0 < float((half - expected).abs().mean()) < HALF


def test_gradients_are_the_cpus(device: torch.device) -> None:
    """Through the fused head and the model, as the update takes them."""
    from iwopd.lm import ResponseModel, Sequences

    rollouts = written(make_model("qwen3", vocab=24).eval(), "lean")

    def gradients(place: torch.device) -> dict[str, torch.Tensor]:
        model = make_model("qwen3", vocab=24).to(place)
        lm = ResponseModel(model, vocab_size=21)
        lm.logprobs(Sequences.from_rollouts(rollouts).to(place)).mean().backward()
        return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}

    expected, found = gradients(CPU), gradients(device)
    for name, values in expected.items():
        assert float((found[name] - values).norm()) <= 1e-4 * float(values.norm()) + 1e-7, name


def test_packed_sequences_in_bfloat16(device: torch.device) -> None:
    """Through FlashAttention on a GPU, through torch's attention on a CPU."""
    attention = "sdpa" if device.type == "cpu" else flash.FLASH
    if attention == flash.FLASH and importlib.util.find_spec("flash_attn") is None:
        pytest.skip(f"flash_attn is not installed: {flash.INSTALL}")
    scored = flash.score_through(device, attention)
    assert scored.obstacle is None
    assert scored.difference < HALF

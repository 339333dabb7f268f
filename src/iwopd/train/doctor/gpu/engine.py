"""vLLM in a process of its own: it starts, says what the trainer says of its tokens, and follows new weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from iwopd import algo
from iwopd.rollout.engine import Engine, EngineError, Student
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.settings import VllmSettings
from iwopd.teacher.local import LocalScorer
from iwopd.tiny import build_tokenizer, eval_prompts
from iwopd.tiny.architecture import ModelSize, new_model
from iwopd.train.doctor.findings import Finding, failure, passed
from iwopd.train.mismatch import LIMITS
from iwopd.types import Rollout

TOKENS = 32
PROMPTS = 8
REMEDY = "look at docs/vllm.md for versions that work together, or set rollout.engine = 'local'"


def check_engine(device: torch.device) -> Iterator[Finding]:
    """A random model of the embedded world's kind, with heads of 32 numbers: vLLM takes no smaller ones."""
    from iwopd.rollout.vllm import VllmEngine

    dtype = "float32" if device.type == "cpu" else "bfloat16"
    model: Any = new_model(ModelSize(128, 2), "iwopd/doctor/engine")
    model.to(device).eval()
    settings = VllmSettings(dtype=dtype, max_model_len=128, memory_share=0.2, cache_gb=0.25, eager=True)
    try:
        engine = VllmEngine(student_of(model), settings)
    except EngineError as error:
        yield failure("vllm", str(error), REMEDY)
        return
    with engine:
        yield passed("vllm", f"it starts with a tiny model in {dtype}")
        yield from follow_weights(engine, model, LIMITS[dtype])


def student_of(model: Any) -> Student:
    return Student.of(model, build_tokenizer(), longest=128)


def follow_weights(engine: Engine, model: Any, limit: float) -> Iterator[Finding]:
    """Log-probs that come with rollouts against the trainer's, before and after an update of the weights."""
    scorer = LocalScorer(model, vocab_size=len(build_tokenizer()))
    sampler = engine.sampler(SamplingSettings(TOKENS, stop_ids={1}))
    prompts = eval_prompts(6, PROMPTS, build_tokenizer())

    def distance(rollouts: list[Rollout]) -> float:
        written = torch.cat([rollout.rollout_logprobs for rollout in rollouts]).float()
        return algo.mean_difference(written, torch.cat(scorer.score(rollouts)).float())

    first = sampler.sample(prompts, seed=0, step=1)
    before = distance(first)
    words = f"its log-probs are {before:.2g} a token from transformers' (at most {limit:g})"
    yield passed("vllm", words) if before <= limit else failure("vllm", words, REMEDY)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.5 * float(parameter.std(correction=0)) * noise)
    moved, after = distance(first), distance(sampler.sample(prompts, seed=0, step=1))
    words = f"after new weights (which move log-probs by {moved:.2g}) they are {after:.2g} apart"
    if after <= limit < moved:
        yield passed("vllm", f"{words}: it follows the student")
    else:
        yield failure("vllm", f"{words}: it does not follow the student", REMEDY)

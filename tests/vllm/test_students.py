"""Students of other kinds: an adapter that is added in on the way, another architecture, one in two shards."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.settings import VllmSettings
from iwopd.rollout.vllm import VllmEngine
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt
from vllm_support import IDS, ROWS, about, make_model

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": ROWS,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_student(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False)).eval()
    model = make_model(seed=5)
    if kind == "tied":
        return model
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model.eval()


@pytest.mark.parametrize(("kind", "shards"), [("lora", 1), ("llama", 1), ("tied", 2)])
def test_weights_reach_the_engine(kind: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two shards (tensor parallel) the engine has two processes, and weights travel through a folder."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by default each shard wants a NUMA node of its own
    student = make_student(kind)
    engine = VllmEngine(about(student), VllmSettings(max_model_len=128, eager=True, tensor_parallel=shards, cache_gb=0.25))
    try:
        sampler = engine.sampler(SamplingSettings(16, 0.9, stop_ids=(1,)))
        prompts = [Prompt(f"p{number}", tuple(range(2 + number, 30 + number))) for number in range(4)]
        scorer = LocalScorer(student, temperature=0.9, vocab_size=IDS)
        for _ in range(2):
            rollouts = sampler.sample(prompts, seed=0, step=1, samples=2)
            scores = scorer.score(rollouts)
            assert max(float((r.rollout_logprobs - s).abs().max()) for r, s in zip(rollouts, scores, strict=True)) < 1e-4
            with torch.no_grad():
                for parameter in student.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05 * torch.randn_like(parameter))
            moved = scorer.score(rollouts)
            assert max(float((a - b).abs().max()) for a, b in zip(scores, moved, strict=True)) > 0.01
    finally:
        engine.close()

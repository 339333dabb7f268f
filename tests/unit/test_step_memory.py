"""The memory estimate: parameters against published sizes and real models, the rest against sums done by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import Qwen3Config

from iwopd.train.memory import activation_elements, cache_elements, parameter_count, step_memory
from models import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_memory", ROOT / "bench" / "gpu_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_memory"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_parameters_are_those_of_the_model(kind: str) -> None:
    model = make_model(kind)
    assert parameter_count(model.config) == sum(parameter.numel() for parameter in model.parameters())


def test_the_public_sizes(bench: ModuleType) -> None:
    published = {"0.6B": 596_049_920, "1.7B": 1.72e9, "4B": 4.02e9, "30B-A3B": 30.5e9, "235B-A22B": 235.1e9}
    for name, size in published.items():
        assert parameter_count(bench.CONFIGS[f"Qwen3-{name}"]) == pytest.approx(size, rel=0.002)


def test_a_step_by_hand() -> None:
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    size = 1000 * 64 + 3 * layer + 64
    assert parameter_count(config) == size
    assert cache_elements(config) == 3 * 2 * 2 * 16
    kept = 8 * 64 + 4 * (4 + 2) * 16 + 4 * 128
    assert activation_elements(config, gradient_checkpointing=False) == 3 * kept
    assert activation_elements(config, gradient_checkpointing=True) == 3 * 64 + kept
    needed = step_memory(config, config, micro_batch_tokens=10, cached_tokens=0, shards=2, gradient_checkpointing=False)
    assert (needed.weights, needed.gradients, needed.adam) == (2 * size, 2 * size, 4 * size)
    assert needed.teacher == size
    assert needed.activations == 10 * 3 * kept * 2
    assert needed.head == 4 * 2**27 + 4 * 1000 * 64
    assert needed.total == 2 * size + 4 * size + size + 2 * size + needed.activations + needed.head
    rollouts = step_memory(config, micro_batch_tokens=10, cached_tokens=10**7)
    assert rollouts.total == 12 * size + 10**7 * 192 * 2  # the cache is larger than what the update needs
    assert "kv cache 3.8" in str(rollouts)


def test_an_adapter_trains_little() -> None:
    config: Any = make_model("qwen3").config
    size = parameter_count(config)
    needed = step_memory(config, micro_batch_tokens=1, cached_tokens=1, weight_bytes=2, trained=100)
    assert (needed.weights, needed.gradients, needed.adam) == (2 * size + 400, 400, 800)


def test_the_docs_hold_what_the_bench_prints(bench: ModuleType) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    for table in (bench.models, bench.one_small, bench.eight_large):
        for line in "\n".join(table()).splitlines():
            assert line in text, f"docs/gpu.md lacks: {line}; run bench/gpu_memory.py"

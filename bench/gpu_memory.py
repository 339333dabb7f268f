"""Prints the tables of docs/gpu.md: what the paper's pairs need, from the models' public configs. No GPU is asked.

python bench/gpu_memory.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iwopd.cluster.plan.models import PUBLIC, make_config
from iwopd.train.memory import GB, StepMemory, cache_elements, parameter_count, step_memory

PROMPT, RESPONSE = 2048, 16384
SHORT = 4096
"""Response length of the small set-ups."""


CONFIGS: dict[str, Any] = {name: make_config(shape) for name, shape in PUBLIC.items()}
"""Sizes of the public configs; the Instruct-2507 models have those of the model that they are named after."""


def lora_size(config: Any, rank: int = 16) -> int:
    """Parameters of an adapter on all linear layers of a dense model."""
    heads, keys, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(hidden, heads * width), (hidden, keys * width), (hidden, keys * width), (heads * width, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return int(config.num_hidden_layers * rank * sum(a + b for a, b in shapes))


def models() -> Iterator[str]:
    yield "| model | parameters | float32 | bfloat16 | cache a token | cache of one longest sequence |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, config in CONFIGS.items():
        size, cell = parameter_count(config), 2 * cache_elements(config)
        longest = cell * (PROMPT + RESPONSE) / GB
        sizes = f"{size / 1e9:.2f} B | {4 * size / GB:.1f} GB | {2 * size / GB:.1f} GB"
        yield f"| {name} | {sizes} | {cell / 1e3:.0f} kB | {longest:.1f} GB |"


def _row(words: str, needed: StepMemory, limit: float) -> str:
    cells = (
        needed.weights + needed.adam,
        needed.gradients,
        needed.teacher,
        needed.activations,
        needed.head,
        needed.kv_cache,
    )
    verdict = "yes" if needed.total < 0.85 * limit * GB else "tight" if needed.total < limit * GB else "no"
    return f"| {words} | " + " | ".join(f"{cell / GB:.1f}" for cell in cells) + f" | {needed.total / GB:.1f} | {verdict} |"


HEAD = (
    "| set-up | weights and Adam | gradients | teacher | activations | head | cache | largest sum | fits |\n"
    + "| --- " * 9
    + "|"
)


def one_small() -> Iterator[str]:
    """One GPU of 24 GB, answers of up to 4096 tokens, 8 rows under way."""
    tokens, cached = PROMPT + SHORT, 8 * (PROMPT + SHORT)
    teacher = CONFIGS["Qwen3-4B"]
    yield HEAD
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"):
        student = CONFIGS[name]
        options: dict[str, Any] = {"micro_batch_tokens": tokens, "cached_tokens": cached}
        yield _row(f"{name}, all weights, teacher 4B here", step_memory(student, teacher, **options), 24)
        yield _row(f"{name}, all weights, teacher behind a server", step_memory(student, **options), 24)
        adapter = {**options, "weight_bytes": 2, "trained": lora_size(student)}
        yield _row(f"{name}, LoRA rank 16, teacher 4B here", step_memory(student, teacher, **adapter), 24)
    quantised = {**options, "weight_bytes": 0.55, "trained": lora_size(student)}
    yield _row("Qwen3-4B, QLoRA rank 16, teacher 4B here", step_memory(student, teacher, **quantised), 24)


def eight_large() -> Iterator[str]:
    """Eight GPUs of 80 GB, per GPU, at the paper's lengths; weights and moments spread over all eight, 8 rows under way."""
    tokens, cached = PROMPT + RESPONSE, 8 * (PROMPT + RESPONSE)
    yield HEAD
    for name, guide in [
        ("Qwen3-0.6B", "Qwen3-4B"),
        ("Qwen3-4B", "Qwen3-4B"),
        ("Qwen3-0.6B", "Qwen3-30B-A3B"),
        ("Qwen3-4B", "Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
    ]:
        needed = step_memory(CONFIGS[name], CONFIGS[guide], micro_batch_tokens=tokens, cached_tokens=cached, shards=8)
        yield _row(f"{name} from {guide}", needed, 80)
    alone = step_memory(CONFIGS["Qwen3-4B"], CONFIGS["Qwen3-30B-A3B"], micro_batch_tokens=tokens, cached_tokens=cached)
    yield _row("Qwen3-4B from Qwen3-30B-A3B, nothing spread (this trainer)", alone, 80)
    small = step_memory(CONFIGS["Qwen3-1.7B"], CONFIGS["Qwen3-4B"], micro_batch_tokens=tokens, cached_tokens=cached)
    yield _row("Qwen3-1.7B from Qwen3-4B, nothing spread (this trainer)", small, 80)
    server = step_memory(CONFIGS["Qwen3-4B"], micro_batch_tokens=tokens, cached_tokens=cached)
    yield _row("Qwen3-4B, teacher behind a server, nothing spread (this trainer)", server, 80)


if __name__ == "__main__":
    for table in (models, one_small, eight_large):
        print(*table(), sep="\n", end="\n\n")

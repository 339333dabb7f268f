"""Prints the tables of docs/gpu.md: what the paper's pairs need, from the models' public configs. No GPU is asked.

python bench/gpu_memory.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iwopd.cluster.plan import GPUS, Gpu, Workload, make_plan, open_workload
from iwopd.cluster.plan.layout import local_layout
from iwopd.cluster.plan.public_models import PUBLIC, make_config
from iwopd.config import make_config as make_settings
from iwopd.train.memory import GB, UPDATE, ModelShape

PROMPT, RESPONSE = 2048, 16384
SHORT = 4096
"""Response length of the small set-ups."""

SHAPES = {name: ModelShape.of(make_config(shape)) for name, shape in PUBLIC.items()}
"""Sizes of the public configs; the Instruct-2507 models have those of the model that they are named after."""


def workload(student: str, teacher: str, response: int = RESPONSE, /, **overrides: Any) -> Workload:
    """One sequence per micro-batch, gradient checkpointing, bfloat16 autocast, the teacher in bfloat16."""
    settings: dict[str, Any] = {
        "precision": "bf16",
        "models": {"student": student, "teacher": teacher, "teacher_dtype": "bfloat16"},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": PROMPT},
        "rollout": {"prompts_per_step": 1024, "max_tokens": response},
        "optim": {"gradient_checkpointing": True, "token_budget": PROMPT + response},
    }
    for section, values in overrides.items():
        settings[section] = {**settings.get(section, {}), **values}
    return open_workload(make_settings(settings))


def models() -> Iterator[str]:
    yield "| model | parameters | float32 | bfloat16 | cache per token (bfloat16) | cache of one longest sequence |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, shape in SHAPES.items():
        size, cell = shape.count.total, 2 * shape.cache_elements
        longest = cell * (PROMPT + RESPONSE) / GB
        sizes = f"{size / 1e9:.2f} B | {4 * size / GB:.1f} GB | {2 * size / GB:.1f} GB"
        yield f"| {name} | {sizes} | {cell / 1e3:.0f} kB | {longest:.1f} GB |"


COLUMNS = "weights and Adam | teacher | rollouts | scores | update | needed | fits | rows"
HEAD = f"| set-up | {COLUMNS} |\n" + "| --- " * 9 + "|"


def _local(words: str, work: Workload, gpu: Gpu, ranks: int = 1) -> str:
    """What stays, what the stages take on top of it (rollouts: with one row under way), and their largest sum."""
    layout, memory = local_layout(work, gpu, ranks), work.on_one_device(memory=gpu.memory, ranks=ranks)
    (need,) = layout.needs
    own, state = sum(memory.state[name] for name in ("weights", "masters", "adam")), sum(memory.state.values())
    stages = [memory.needed(*names) - state for names in (("rollouts",), ("scores",), UPDATE)]
    cells = [own, state - own, *stages, need.needed]
    rows = f"{layout.cache_tokens // work.longest:.0f}" if layout.fits else "-"
    return f"| {words} | " + " | ".join(f"{cell / GB:.1f}" for cell in cells) + f" | {need.verdict} | {rows} |"


SERVER: dict[str, Any] = {"teacher": {"urls": ["http://teacher:8000"]}}
HALF: dict[str, Any] = {"models": {"dtype": "bfloat16"}}
SHARD: dict[str, Any] = {"optim": {"shard": True}}
LORA: dict[str, Any] = {**HALF, "lora": {"rank": 16}}
QLORA: dict[str, Any] = {**HALF, "lora": {"rank": 16, "quantize": "4bit"}}


def one_small() -> Iterator[str]:
    """This trainer on one GPU of 24 GB, answers of up to 4096 tokens."""
    yield HEAD
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"):
        for words, settings in (
            ("float32, teacher 4B here", {}),
            ("float32, teacher behind a server", SERVER),
            ("bfloat16, teacher 4B here", HALF),
            ("LoRA rank 16, teacher 4B here", LORA),
        ):
            yield _local(f"{name}, {words}", workload(name, "Qwen3-4B", SHORT, **settings), GPUS["rtx4090"])
    yield _local("Qwen3-4B, QLoRA rank 16, teacher 4B here", workload("Qwen3-4B", "Qwen3-4B", SHORT, **QLORA), GPUS["rtx4090"])


def one_large() -> Iterator[str]:
    """This trainer on one GPU of 80 GB, at the paper's lengths."""
    yield HEAD
    for name, teacher in (("Qwen3-0.6B", "Qwen3-4B"), ("Qwen3-1.7B", "Qwen3-4B"), ("Qwen3-4B", "Qwen3-30B-A3B")):
        yield _local(f"{name} from {teacher}", workload(name, teacher), GPUS["h100"])
    yield _local("Qwen3-4B, teacher behind a server", workload("Qwen3-4B", "Qwen3-4B", **SERVER), GPUS["h100"])


def eight_local() -> Iterator[str]:
    """This trainer in eight processes on eight GPUs of 80 GB with `optim.shard`, at the paper's lengths; one of the GPUs."""
    yield HEAD
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"):
        for words, teacher, settings in (
            ("teacher 4B beside each", "Qwen3-4B", {}),
            ("teacher 30B-A3B behind a server", "Qwen3-30B-A3B", SERVER),
        ):
            yield _local(f"{name}, {words}", workload(name, teacher, **SHARD, **settings), GPUS["h100"], ranks=8)


def eight_large() -> Iterator[str]:
    """Verl on eight GPUs of 80 GB, at the paper's lengths, in the split that the plan chooses."""
    yield "| pair | GPUs of student and teacher | student, update | student, rollouts | teacher | fits |"
    yield "| --- " * 6 + "|"
    for name, teacher in [
        ("Qwen3-0.6B", "Qwen3-4B"),
        ("Qwen3-4B", "Qwen3-4B"),
        ("Qwen3-0.6B", "Qwen3-30B-A3B"),
        ("Qwen3-4B", "Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
    ]:
        layout = make_plan(workload(name, teacher), GPUS["h100"], 1, 8).layout
        cells = " | ".join(f"{need.needed / GB:.1f}" for need in layout.needs)
        verdicts = {need.verdict for need in layout.needs}
        verdict = next(word for word in ("no", "tight", "yes") if word in verdicts)
        yield f"| {name} from {teacher} | {layout.student_gpus} + {layout.teacher_gpus} | {cells} | {verdict} |"


TABLES = (models, one_small, one_large, eight_local, eight_large)

if __name__ == "__main__":
    for table in TABLES:
        print(*table(), sep="\n", end="\n\n")

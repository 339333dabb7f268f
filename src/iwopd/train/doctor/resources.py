"""Will a step fit into memory, and the checkpoints onto the disk. Estimates: the arithmetic is in docs/doctor.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from iwopd.adapters import add_adapter
from iwopd.algo.head import CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS_GPU
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.memory import activation_elements, cache_elements

TIGHT = 0.9
"""Share of the memory there is from which an estimate is a warning."""
CACHE_SHARE = 0.5
"""Share of a GPU's free memory that the sampler takes for keys and values."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PARTS = ("weights", "optimizer", "teacher", "reference", "activations", "head", "cache")


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters."""

    student: int
    trained: int
    teacher: int
    reference: int


@dataclass(frozen=True)
class Estimate:
    """Bytes of one step, by what they hold."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Activations and head of the update do not meet the cache of the rollout, so the larger counts."""
        resident = sum(self.parts[name] for name in ("weights", "optimizer", "teacher", "reference"))
        return resident + max(self.parts["activations"] + self.parts["head"], self.parts["cache"])

    def text(self) -> str:
        shown = ", ".join(f"{name} {gigabytes(self.parts[name])}" for name in PARTS if self.parts[name] >= 1e6)
        return f"about {gigabytes(self.total)} ({shown or 'each part under a megabyte'})"


def check_resources(case: Case, models: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Memory and disk. `models`, by name, are those that are loaded already; else their configs say how large they would be."""
    configs = {name: model.config for name, model in (models or {}).items()} or {
        member.name: member.config for member in case.members.values() if member.config is not None
    }
    if "student" not in configs or ("teacher" not in configs and not case.teacher.elsewhere):
        return
    sizes = _sizes(case, configs, models or {})
    estimate = estimate_step(case, sizes, configs["student"])
    yield from _memory(case, estimate, models is not None)
    yield from _disk(case, sizes)


def estimate_step(case: Case, sizes: Sizes, student: Any) -> Estimate:
    """The memory of one training step."""
    config = case.config
    size = BYTES[config.models.dtype]
    trained_size = 4 if config.lora.rank else size
    frozen = sizes.student - sizes.trained if config.lora.rank else 0
    frozen_size = {"none": float(size), "8bit": 1.0, "4bit": 0.55}[config.lora.quantize]
    text = student.get_text_config()
    longest = case.longest_prompt + (case.max_response or 0)
    rollouts = config.rollout.prompts_per_step * config.rollout.samples
    tokens = max(longest, min(config.optim.token_budget, rollouts * longest))
    kept = activation_elements(student, config.optim.gradient_checkpointing)
    chunk = (CHUNK_ELEMENTS_GPU if torch.cuda.is_available() else CHUNK_ELEMENTS_CPU) * 4
    matrix = 0 if config.lora.rank else text.vocab_size * text.hidden_size * 4
    cache = rollouts * longest * cache_elements(student) * size
    teacher_here = config.models.teacher_device is None and not case.teacher.elsewhere
    return Estimate(
        {
            "weights": int(frozen * frozen_size) + sizes.trained * trained_size,
            "optimizer": 3 * sizes.trained * trained_size,  # gradient and Adam's two moments
            "teacher": sizes.teacher * BYTES[config.models.teacher_dtype or config.models.dtype] if teacher_here else 0,
            "reference": sizes.reference * size,
            "activations": tokens * kept * size,
            "head": chunk + matrix,
            "cache": min(cache, _most_cache()),
        }
    )


def available_memory() -> tuple[int, str] | None:
    """Bytes that a run could use, and of what; None where the system does not tell."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free), "GPU"
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except (OSError, ValueError):
        return None
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:  # a container may have less than the machine
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    except (OSError, ValueError):
        pass
    return free, "machine"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _memory(case: Case, estimate: Estimate, loaded: bool) -> Iterator[Finding]:
    there = available_memory()
    if there is None:
        yield warning("memory", f"a step needs {estimate.text()}; how much there is, is unknown", "compare it yourself")
        return
    free, what = there
    if loaded:  # the weights are in memory already, and no longer free
        free += sum(estimate.parts[name] for name in ("weights", "teacher", "reference"))
    words = f"a step needs {estimate.text()}; the {what} has {gigabytes(free)} free"
    remedy = (
        "lower optim.token_budget, set optim.gradient_checkpointing = true, train an adapter (lora.rank = 16), load in "
        "bfloat16 (models.dtype), or put the teacher elsewhere (models.teacher_device)"
    )
    if estimate.total > free:
        yield failure("memory", words, remedy)
    elif estimate.total > TIGHT * free:
        yield warning("memory", words, remedy)
    else:
        yield passed("memory", words)


def _disk(case: Case, sizes: Sizes) -> Iterator[Finding]:
    config = case.config
    each = sizes.trained * (4 if config.lora.rank else BYTES[config.models.dtype]) * 3  # weights and Adam's two moments
    kept = config.checkpoint.keep + 1 + (config.checkpoint.best is not None)  # one is written before one goes
    nearest = next(folder for folder in (case.folder, *case.folder.absolute().parents) if folder.exists())
    free = shutil.disk_usage(nearest).free
    words = f"{kept} checkpoints of {gigabytes(each)} in {case.folder}; free: {gigabytes(free)}"
    remedy = "free some space, put the run on another disk (--out), or lower checkpoint.keep"
    if each * kept > free:
        yield failure("disk", words, remedy)
    elif each * kept > TIGHT * free:
        yield warning("disk", words, remedy)
    else:
        yield passed("disk", words)


def _sizes(case: Case, configs: Mapping[str, Any], models: Mapping[str, Any]) -> Sizes:
    def count(name: str) -> int:
        return _count(models[name]) if name in models else _count(_empty_model(configs[name])) if name in configs else 0

    student = models.get("student")
    if student is None:
        student = _empty_model(configs["student"])
        if case.config.lora.rank:
            add_adapter(student, case.config.lora)
    trained = sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
    reference = count("reference") if models.get("reference") is not models.get("student") or not models else 0
    return Sizes(_count(student), trained, count("teacher"), reference)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _empty_model(config: Any) -> Any:
    """The model without memory for its weights."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return build.from_config(config)


def _most_cache() -> int:
    from iwopd.rollout.local import CACHE_BYTES_CPU

    return int(torch.cuda.mem_get_info()[0] * CACHE_SHARE) if torch.cuda.is_available() else CACHE_BYTES_CPU

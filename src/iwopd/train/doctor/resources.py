"""Will a step fit into memory, and the checkpoints onto the disk. The arithmetic: docs/gpu.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from iwopd.models import ModelSource
from iwopd.train.doctor.case import Case, read_member
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.memory import ModelShape, RunShape, StepMemory

TIGHT = 0.9
"""Share of the memory there is from which an estimate is a warning."""


def check_resources(case: Case, models: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Memory and disk. `models`, by name, are those that are loaded already; else their configs say how large they would be."""
    unread: list[str] = []
    if models is not None:
        own = {name: model for name, model in models.items() if name == "student" or model is not models["student"]}
        configs = {name: model.config for name, model in own.items()}
    else:
        configs, unread = _configs(case)
    if "student" not in configs or ("teacher" not in configs and not case.teacher.elsewhere):
        return
    for name in unread:
        remedy = f"correct teacher.others.{name}.model"
        yield warning("memory", f"the teacher {name!r} is not counted: its config cannot be read", remedy)
    memory = step_memory(case, configs)
    yield from _memory(memory, loaded=models is not None)
    yield from _disk(case, memory.checkpoint)


def step_memory(case: Case, configs: Mapping[str, Any]) -> StepMemory:
    """What a training step takes on this machine, given the configs of the models that it loads, by name."""
    shapes = {name: ModelShape.of(config) for name, config in configs.items()}
    run = RunShape(
        config=case.config,
        student=shapes.pop("student"),
        reference=shapes.pop("reference", None),
        teachers=shapes,
        longest=case.longest_prompt + (case.max_response or 0),
    )
    if not torch.cuda.is_available():
        return run.on_one_device(gpus=0)
    return run.on_one_device(gpus=torch.cuda.device_count(), memory=torch.cuda.mem_get_info()[1])


def _configs(case: Case) -> tuple[dict[str, Any], list[str]]:
    """Configs of the models that the run loads, by name, and the names of further teachers whose config cannot be read."""
    others = {
        name: read_member(name, ModelSource.of(other.model), case.config.models.trust_remote_code, elsewhere=False)
        for name, other in case.config.teacher.others.items()
        if other.model is not None
    }
    members = {name: member for name, member in case.members.items() if not member.elsewhere}
    members |= {f"teacher {name!r}": member for name, member in others.items()}
    read = {name: member.config for name, member in members.items() if member.config is not None}
    return read, [name for name, member in others.items() if member.config is None]


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
    with suppress(OSError, ValueError):  # a container may have less than the machine
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free, "machine"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _memory(memory: StepMemory, *, loaded: bool) -> Iterator[Finding]:
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in memory.parts.items() if size >= 1e6)
    words = f"a step needs about {gigabytes(memory.total)} ({parts or 'each part under a megabyte'})"
    there = available_memory()
    if there is None:
        yield warning("memory", f"{words}; how much is free is unknown", "compare it yourself")
        return
    free, what = there
    if loaded:  # the weights are in memory already, and no longer free
        free += int(memory.weights + memory.teachers + memory.reference)
    remedy = (
        "lower optim.token_budget, set optim.gradient_checkpointing = true, train an adapter (lora.rank = 16), load in "
        "bfloat16 (models.dtype), or put the teacher elsewhere (models.teacher_device)"
    )
    yield _verdict("memory", memory.total, free, f"{words}; the {what} has {gigabytes(free)} free", remedy)


def _disk(case: Case, each: float) -> Iterator[Finding]:
    config = case.config
    kept = config.checkpoint.keep + 1 + (config.checkpoint.best is not None)  # one is written before one goes
    nearest = next(folder for folder in (case.folder, *case.folder.absolute().parents) if folder.exists())
    free = shutil.disk_usage(nearest).free
    words = f"{kept} checkpoints of {gigabytes(each)} in {case.folder}; free: {gigabytes(free)}"
    remedy = "free some space, put the run on another disk (--out), or lower checkpoint.keep"
    yield _verdict("disk", each * kept, free, words, remedy)


def _verdict(check: str, needed: float, free: float, words: str, remedy: str) -> Finding:
    if needed > free:
        return failure(check, words, remedy)
    return warning(check, words, remedy) if needed > TIGHT * free else passed(check, words)

"""Will a step fit into memory, and the checkpoints onto the disk. The arithmetic: docs/gpu.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iwopd.config import Config
from iwopd.devices import accelerator, free_bytes, total_bytes
from iwopd.models import ModelSource
from iwopd.train.doctor.case import Case, read_member
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.loading import reference_weights
from iwopd.train.memory import ModelShape, RunShape, StepMemory
from iwopd.train.ranks import Launched, launched

TIGHT = 0.9
"""Share of the memory there is from which an estimate is a warning."""
REMEDY = (
    "lower optim.token_budget, set optim.gradient_checkpointing = true, train an adapter on bfloat16 weights (lora.rank = 16, "
    "models.dtype = 'bfloat16'), put the teacher elsewhere (teacher.urls, or models.teacher_device), or train on several GPUs "
    "with optim.shard = true"
)


@dataclass(frozen=True)
class Accelerators:
    """The GPUs that this process sees."""

    count: int
    total: int
    """Bytes of the one it computes on."""
    free: int


def check_resources(case: Case, models: Mapping[str, Any] | None = None, ranks: Launched | None = None) -> Iterator[Finding]:
    """Memory and disk. `models`, by name, are those that are loaded already; else their configs say how large they would be.

    ranks: the processes of the run; by default those that were launched.
    """
    unread: list[str] = []
    if models is not None:
        copies = _of_student(case.config)  # no models beside the student's
        configs = {name: model.config for name, model in models.items() if name not in copies}
    else:
        configs, unread = _configs(case)
    if "student" not in configs or ("teacher" not in configs and not case.teacher.elsewhere):
        return
    for name in unread:
        remedy = f"correct teacher.others.{name}.model"
        yield warning("memory", f"the teacher {name!r} is not counted: its config cannot be read", remedy)
    ranks = ranks or launched()
    run, gpus = run_shape(case, configs), accelerators(ranks.number)
    memory = step_memory(run, gpus, ranks.count)
    if gpus is None and case.config.models.teacher_offload:
        yield passed("memory", "models.teacher_offload does nothing here: without a GPU the teacher is on the CPU already")
    yield from _memory(memory, gpus, ranks.here, loaded=models is not None)
    if gpus is not None:
        yield from _main_memory(run.in_main_memory(ranks.here), ranks.here)
    yield from _disk(case, memory.checkpoint)


def _of_student(config: Config) -> set[str]:
    """Who scores with weights of the student: its own, or their average, which `RunShape` counts."""
    found = {"teacher": config.teacher.source, "reference": reference_weights(config)}
    return {name for name, weights in found.items() if weights != "model"}


def run_shape(case: Case, configs: Mapping[str, Any]) -> RunShape:
    """The run as far as its memory is concerned, given the configs of the models that it loads, by name."""
    shapes = {name: ModelShape.of(config) for name, config in configs.items()}
    return RunShape(
        config=case.config,
        student=shapes.pop("student"),
        reference=shapes.pop("reference", None),
        teachers=shapes,
        longest=case.longest_prompt + (case.max_response or 0),
    )


def step_memory(run: RunShape, gpus: Accelerators | None, ranks: int) -> StepMemory:
    """What a training step of one of `ranks` processes takes on this machine."""
    if gpus is None:
        return run.on_one_device(gpus=0, ranks=ranks)
    return run.on_one_device(gpus=gpus.count, memory=gpus.total, ranks=ranks)


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


def accelerators(number: int = 0) -> Accelerators | None:
    """As process `number` of the machine sees them; None without a GPU, or where it does not tell how much memory it has."""
    kind = accelerator()
    if kind is None or not hasattr(torch.get_device_module(kind), "mem_get_info"):
        return None
    count = torch.accelerator.device_count()
    device = torch.device(kind.type, number % count)
    return Accelerators(count, total_bytes(device), free_bytes(device))


def main_memory() -> int | None:
    """Bytes of the machine that a run could use; None where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except (OSError, ValueError):
        return None
    free = int(lines["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # a container may have less than the machine
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _memory(memory: StepMemory, gpus: Accelerators | None, ranks: int, *, loaded: bool) -> Iterator[Finding]:
    """Each process has a GPU of its own; without GPUs all of them share the machine."""
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in memory.parts.items() if size >= 1e6)
    words = f"a step needs about {gigabytes(memory.total)}, most of all in its {memory.largest()}"
    words += f" ({parts or 'each part under a megabyte'})"
    needed = memory.total
    if ranks > 1 and gpus is None:
        needed *= ranks
        words += f"; {ranks} processes on this machine together {gigabytes(needed)}"
    elif ranks > 1:
        words += f" on the GPU of each of the {ranks} processes"
    free = main_memory() if gpus is None else gpus.free
    if free is None:
        yield warning("memory", f"{words}; how much is free is unknown", "compare it yourself")
        return
    if loaded:  # what is in memory already is no longer free
        free += int(sum(size for name, size in memory.state.items() if name != "adam"))
    what = "machine" if gpus is None else "GPU"
    yield _verdict("memory", needed, free, f"{words}; the {what} has {gigabytes(free)} free", REMEDY)


def _main_memory(needed: float, ranks: int) -> Iterator[Finding]:
    """Beside GPUs: teachers on the CPU, and what a step keeps of its tokens."""
    free = main_memory()
    if not needed or free is None:
        return
    copies = f"{ranks} copies, one for each process," if ranks > 1 else "which"
    words = f"teachers on the CPU and distributions kept there, {copies} need about {gigabytes(needed)}; the machine has "
    remedy = "put the teacher behind a server (teacher.urls), which all processes ask, or lower rollout.prompts_per_step"
    yield _verdict("memory", needed, free, f"{words}{gigabytes(free)} free", remedy)


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

"""Who gets which GPUs, what each of them has to hold, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from iwopd.cluster.plan.gpus import Gpu, PlanError
from iwopd.cluster.plan.workload import Workload
from iwopd.cluster.verl.carrying import carried
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.pools import Pools, pools
from iwopd.train.memory import UPDATE, ModelShape, StepMemory
from iwopd.train.memory.run import CACHE_SLACK, FOLLOWED_SHARE

MARGIN = 1.15
"""What the arithmetic leaves out (allocator's slack, CUDA context, communication buffers): docs/gpu.md says 10-20 %."""
ENGINE_MARGIN = 1.05
"""The same where most of the memory is an engine's, which keeps to its share."""
MOST_ROWS = 256
"""Rows under way in one engine (verl's default `max_num_seqs`)."""

Verdict = Literal["yes", "tight", "no"]
Trainer = Literal["verl", "local"]


@dataclass(frozen=True)
class Need:
    """What one kind of GPU has to hold at one time."""

    who: str
    needed: float
    available: float
    parts: Mapping[str, float]
    remedy: str
    margin: float = MARGIN

    @property
    def verdict(self) -> Verdict:
        if self.needed > self.available:
            return "no"
        return "tight" if self.needed * self.margin > self.available else "yes"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to use the GPUs. The defaults are those of one GPU."""

    trainer: Trainer
    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 1
    student_gpus: int = 1
    student_nodes: int = 1
    teacher_gpus: int = 0
    """Of all teachers together."""
    rollout_shards: int = 1
    """GPUs of one rollout engine."""
    teacher_shards: int = 1
    """GPUs of one copy of a teacher."""
    teacher_copies: int = 0
    """Of each teacher."""
    needs: tuple[Need, ...]
    cache_tokens: float
    """Tokens of all rows under way in one rollout engine."""
    largest_share: float
    """Of the GPU's memory that vLLM could have beside the training state."""

    @property
    def fits(self) -> bool:
        return all(need.verdict != "no" for need in self.needs)

    @property
    def engines(self) -> int:
        """Rollout engines."""
        return max(1, self.student_gpus // self.rollout_shards)

    @property
    def overflow(self) -> float:
        return max((need.needed / need.available if need.available > 0 else 99.0) for need in self.needs)

    @property
    def student_link(self) -> float:
        """Bytes/s between the student's GPUs."""
        return self.gpu.link if self.student_nodes == 1 else self.gpu.network


def layouts(work: Workload, gpu: Gpu, nodes: int, gpus_per_node: int, trainer: Trainer | None = None) -> Iterator[Layout]:
    """All ways that are worth a thought. Without a word about the trainer, one GPU is the local one's, more are verl's."""
    if trainer == "local" or (trainer is None and nodes * gpus_per_node == 1):
        yield local_layout(work, gpu, nodes * gpus_per_node, nodes)
        return
    _refuse_on_verl(work)
    settings = work.config.cluster
    total = nodes * gpus_per_node
    found: list[Layout] = []
    for teacher_gpus in range(1, total) if settings.teacher_gpus is None else [settings.teacher_gpus]:
        if work.rows_per_update % ((total - teacher_gpus) // settings.sequence_parallel or 1) == 0:
            found += _on_verl(work, gpu, nodes, gpus_per_node, teacher_gpus)
    yield from found
    if not found:
        count = len(work.teachers)
        raise PlanError(
            f"no split of {nodes} x {gpus_per_node} GPUs between student and teacher works: the student's must divide the "
            f"{work.rows_per_update} rollouts of an update, the teacher's be whole machines or the same number on each"
            f"{f', a multiple of the {count} teachers' if count > 1 else ''}, and tensor-parallel groups fill both; change "
            "--nodes, cluster.teacher_gpus, cluster.teacher_tensor_parallel, engine.vllm.tensor_parallel or "
            "rollout.prompts_per_step"
        )


def _refuse_on_verl(work: Workload) -> None:
    config = work.config
    if config.lora.rank:
        raise PlanError(
            f"lora.rank is {config.lora.rank}, and on verl all weights are trained: plan it for this package's trainer "
            "(--engine local), or with --lora.rank 0"
        )
    if config.teacher.is_student:
        raise PlanError(
            f"teacher.source is {config.teacher.source!r}, and on verl the teacher is a model of its own: plan for one GPU "
            "(--gpus-per-node 1), or name one (models.teacher)"
        )
    if config.teacher.urls:
        raise PlanError("teacher.urls is set, and verl starts the teacher itself: leave it out, or plan for one GPU")
    for name in (f"teacher.others.{name}" for name, other in config.teacher.others.items() if other.urls):
        raise PlanError(f"{name}.urls is set, and verl starts all teachers itself: set {name}.model, or plan for one GPU")
    if config.rollout.horizon.made.stops_online:
        raise PlanError(
            f"rollout.horizon.type is {config.rollout.horizon.type!r}, and on verl no teacher follows answers while they are "
            "written: plan it for one GPU (--gpus-per-node 1), or take a fixed or growing horizon"
        )
    if config.rollout.mix.active:
        raise PlanError(
            "rollout.mix is set, and verl trains on what the student itself wrote: plan it for this package's trainer "
            "(--engine local), or leave it out"
        )
    try:
        carried(config.method, rewarded=config.reward.checker is not None)
    except VerlError as error:
        raise PlanError(f"{error}, or plan for one GPU (--gpus-per-node 1)") from None


def asked_layout(work: Workload, gpu: Gpu) -> Layout:
    """The one that the launcher makes of these settings, whether it fits or not."""
    _refuse_on_verl(work)
    cluster = work.config.cluster
    try:
        split = pools(work.config)
    except VerlError as error:
        raise PlanError(str(error)) from None
    machines = (cluster.nodes, cluster.gpus_per_node)
    return _layout(work, gpu, *machines, split, cluster.teacher_tensor_parallel, work.vllm.tensor_parallel)


def _on_verl(work: Workload, gpu: Gpu, nodes: int, gpus_per_node: int, teacher_gpus: int) -> Iterator[Layout]:
    """The smallest tensor-parallel sizes that fit this split; where none does, the largest. What was asked for stays."""
    cluster, vllm = work.config.cluster, work.vllm
    least = cluster.teacher_tensor_parallel
    split: Pools | None = None
    for shards in [least] if "teacher_tensor_parallel" in cluster.model_fields_set else _doubled(least, gpus_per_node):
        shared = _pools(work, nodes, gpus_per_node, teacher_gpus, shards)
        if shared is None or shards > max(least, shared.teacher.gpus_per_node):
            continue
        split, teacher_shards = shared, shards
        teachers = _teacher_needs(work, gpu, shards)
        if all(need.verdict != "no" for need in teachers):
            break
    if split is None or split.student.gpus % vllm.tensor_parallel:
        return
    sizes = _divisors(vllm.tensor_parallel, split.student.gpus_per_node)
    for rollout_shards in sizes[:1] if "tensor_parallel" in vllm.model_fields_set else sizes:
        found = _layout(work, gpu, nodes, gpus_per_node, split, teacher_shards, rollout_shards)
        yield found
        if found.needs[WRITING].verdict != "no":
            break


WRITING = 1
"""Place of the rollouts among the needs of a layout on verl."""


def _layout(
    work: Workload, gpu: Gpu, nodes: int, gpus_per_node: int, split: Pools, teacher_shards: int, rollout_shards: int
) -> Layout:
    memory = work.on_verl(gpus=split.student.gpus, engine_shards=rollout_shards, gpu_memory=gpu.memory)
    token = work.student.cache_elements * work.writing_bytes("verl") / rollout_shards
    writing = _rollouts_need(work, gpu, memory, work.longest * token)
    return Layout(
        trainer="verl",
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        student_gpus=split.student.gpus,
        student_nodes=split.student.nodes,
        teacher_gpus=split.teacher.gpus,
        rollout_shards=rollout_shards,
        teacher_shards=teacher_shards,
        teacher_copies=split.teacher_replicas,
        needs=(_update_need(gpu, memory), writing, *_teacher_needs(work, gpu, teacher_shards)),
        cache_tokens=memory.writer.cache / token,
        largest_share=(gpu.memory / 1.1 - _kept(memory)) / gpu.memory,
    )


def _teacher_needs(work: Workload, gpu: Gpu, shards: int) -> list[Need]:
    return [_teacher_need(work, name, teacher, gpu, shards) for name, teacher in work.teachers.items()]


def _pools(work: Workload, nodes: int, gpus_per_node: int, teacher_gpus: int, teacher_shards: int) -> Pools | None:
    """The launcher's own split of the GPUs; None if it refuses this one."""
    chosen = {"nodes": nodes, "gpus_per_node": gpus_per_node, "teacher_gpus": teacher_gpus}
    cluster = work.config.cluster.model_copy(update={**chosen, "teacher_tensor_parallel": teacher_shards})
    try:
        return pools(work.config.model_copy(update={"cluster": cluster}))
    except VerlError:
        return None


def _doubled(least: int, most: int) -> list[int]:
    """Sizes of a tensor-parallel group: the configured one, and powers of two above it."""
    return [least, *(size for size in range(least + 1, most + 1) if size & (size - 1) == 0)]


def _divisors(least: int, most: int) -> list[int]:
    """The same, as far as they divide a machine's GPUs."""
    return [size for size in _doubled(least, most) if most % size == 0] or [least]


def _update_need(gpu: Gpu, memory: StepMemory) -> Need:
    remedy = (
        "use more GPUs for the student, larger ones, or cluster.sequence_parallel; lower optim.token_budget and "
        "rollout.max_tokens; or set cluster.offload = true"
    )
    return Need("student, update", memory.needed(*UPDATE), gpu.memory, memory.parts_of(memory.largest(*UPDATE)), remedy)


def _rollouts_need(work: Workload, gpu: Gpu, memory: StepMemory, row: float) -> Need:
    """row: bytes of the longest answer's cache."""
    share = work.vllm.memory_share
    if memory.writer.cache < row:  # not even one longest answer: the share is too small
        needed = memory.writer.weights + memory.writer.working + row
        parts: dict[str, float] = memory.writer.parts | {"cache": 0.0, "one longest answer": row}
        remedy = f"raise engine.vllm.memory_share (now {share:g}) or engine.vllm.tensor_parallel, or lower rollout.max_tokens"
        return Need("student, rollouts", needed, share * gpu.memory, parts, remedy, margin=1.0)
    parts = {"training state": _kept(memory), **memory.writer.parts}
    remedy = f"lower engine.vllm.memory_share (now {share:g}), set cluster.offload = true, or use more GPUs for the student"
    return Need("student, rollouts", memory.needed("rollouts"), gpu.memory, parts, remedy, ENGINE_MARGIN)


def _kept(memory: StepMemory) -> float:
    """Bytes of the training state while rollouts are written."""
    return 0.0 if memory.offloaded else sum(memory.state.values())


def _teacher_need(work: Workload, name: str, teacher: ModelShape, gpu: Gpu, shards: int) -> Need:
    """On one of a teacher's GPUs: the engine must keep to its share, and the logits come on top."""
    share, parts = work.config.cluster.teacher_memory_share, work.scoring_on_verl(teacher, shards)
    total = sum(parts.values())
    engine = total - parts["logits"]
    remedy = (
        f"raise cluster.teacher_tensor_parallel (here {shards}) or cluster.teacher_memory_share (now {share:g}), "
        "or use larger GPUs"
    )
    if engine > share * gpu.memory:
        own = {part: size for part, size in parts.items() if part != "logits"}
        return Need(name, engine, share * gpu.memory, own, remedy, margin=1.0)
    return Need(name, total, gpu.memory, parts, remedy, ENGINE_MARGIN)


def local_layout(work: Workload, gpu: Gpu, ranks: int = 1, nodes: int = 1) -> Layout:
    """This package's trainer, a process on each of `ranks` GPUs: student and teachers together, unless these are elsewhere."""
    memory = work.on_one_device(memory=gpu.memory, ranks=ranks)
    writer = memory.writer
    followed = memory.stages["rollouts"].get("teacher's cache", 0.0)
    free = gpu.memory / MARGIN - memory.needed("rollouts") + writer.cache + followed
    # The sampler's cache takes half of what is free, an engine's what is left of its share.
    cache = writer.cache if work.writer == "engine" else free / 2 / CACHE_SLACK
    token = work.student.cache_elements * work.writing_bytes("local")
    shard = "set optim.shard = true, " if ranks > 1 and not work.config.optim.shard and not work.config.lora.rank else ""
    remedy = (
        f"{shard}train an adapter (--lora.rank 16, with --lora.quantize 4bit if need be), put the teacher behind a server "
        "(teacher.urls), lower optim.token_budget or rollout.max_tokens, or use more GPUs (--gpus-per-node)"
    )
    needs = (Need("the GPU" if ranks == 1 else "each GPU", memory.total, gpu.memory, memory.parts, remedy),)
    cached = cache / token
    if followed:  # the teacher's cache, which is asked for room first
        cached = min(cached, FOLLOWED_SHARE * free / work.followed_token)
    cached = max(cached, float(work.longest))
    share = (free + writer.working + writer.weights) / gpu.memory
    return Layout(
        trainer="local",
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=ranks // nodes,
        student_gpus=ranks,
        student_nodes=nodes,
        needs=needs,
        cache_tokens=cached,
        largest_share=share,
    )

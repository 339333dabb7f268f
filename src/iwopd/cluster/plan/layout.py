"""Who gets which GPUs, what each of them has to hold, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from iwopd.cluster.plan.gpus import Gpu, PlanError
from iwopd.cluster.plan.job import Job
from iwopd.config.cluster import Cluster
from iwopd.train.memory import StepMemory, cache_elements, step_memory

MARGIN = 1.15
"""What the arithmetic leaves out (allocator's slack, CUDA context, communication buffers): docs/gpu.md says 10-20 %."""
ENGINE_WORKING = 2e9
"""Bytes of a vLLM engine besides weights and cache: activations of a batch, CUDA graphs. An assumption."""
MOST_ROWS = 256
"""Rows under way in one engine (verl's default `max_num_seqs`)."""
SCORED_TOKENS = 8192
"""Tokens whose logits vLLM makes at once for prompt log-probs (verl's default `max_num_batched_tokens`)."""
SCORED_BYTES = 6
"""Of each of those logits: a bfloat16 and a float32 copy (docs/plan.md)."""

Verdict = Literal["yes", "tight", "no"]


@dataclass(frozen=True)
class Need:
    """What one kind of GPU has to hold at one time."""

    who: str
    needed: float
    available: float
    parts: dict[str, float]
    way_out: str
    margin: float = MARGIN

    @property
    def verdict(self) -> Verdict:
        if self.needed > self.available:
            return "no"
        return "tight" if self.needed * self.margin > self.available else "yes"


@dataclass(frozen=True)
class Layout:
    """A way to use the GPUs."""

    engine: Literal["verl", "local"]
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    student_gpus: int
    student_nodes: int
    teacher_gpus: int
    rollout_shards: int
    teacher_shards: int
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


def layouts(job: Job, gpu: Gpu, nodes: int, gpus_per_node: int) -> Iterator[Layout]:
    """All ways that are worth a thought."""
    if nodes * gpus_per_node == 1:
        yield local_layout(job, gpu)
        return
    _refuse_on_verl(job)
    settings = job.config.cluster
    total = nodes * gpus_per_node
    found: list[Layout] = []
    for teacher_gpus in sorted(_splits(nodes, gpus_per_node)):
        if settings.teacher_gpus is not None and teacher_gpus != settings.teacher_gpus:
            continue
        rows = job.rollouts // job.config.optim.mini_batches
        if rows % ((total - teacher_gpus) // settings.sequence_parallel or 1) == 0:
            found += _on_verl(job, gpu, nodes, gpus_per_node, teacher_gpus, settings)
    yield from found
    if not found:
        raise PlanError(
            f"no split of {nodes} x {gpus_per_node} GPUs between student and teacher works: the student's must divide the "
            f"{job.rollouts // job.config.optim.mini_batches} rollouts of an update, the teacher's be whole machines or the "
            "same number on each, and tensor-parallel groups fill both; change --nodes, cluster.teacher_gpus, "
            "cluster.teacher_tensor_parallel, engine.vllm.tensor_parallel or rollout.prompts_per_step"
        )


def _refuse_on_verl(job: Job) -> None:
    config = job.config
    if config.lora.rank:
        raise PlanError(
            f"lora.rank is {config.lora.rank}, and on verl all weights are trained: plan it for one GPU (--gpus-per-node 1), "
            "or with --lora.rank 0"
        )
    if job.teacher is None:
        raise PlanError("teacher.urls is set, and verl starts the teacher itself: leave it out, or plan for one GPU")


def _splits(nodes: int, gpus_per_node: int) -> set[int]:
    """Sizes of the teacher's pool: whole machines, or the same number of GPUs on each."""
    return {k * gpus_per_node for k in range(1, nodes)} | {k * nodes for k in range(1, gpus_per_node)}


def _on_verl(job: Job, gpu: Gpu, nodes: int, gpus_per_node: int, teacher_gpus: int, settings: Cluster) -> Iterator[Layout]:
    whole = teacher_gpus % gpus_per_node == 0 and nodes > 1
    teacher_node_gpus = gpus_per_node if whole else teacher_gpus // nodes
    student_nodes = nodes - teacher_gpus // gpus_per_node if whole else nodes
    student_gpus = nodes * gpus_per_node - teacher_gpus
    for teacher_shards in _shards(settings.teacher_tensor_parallel, teacher_node_gpus):
        teacher = teacher_need(job, gpu, teacher_shards, settings.teacher_memory_share)
        if teacher.verdict != "no":
            break
    if teacher_gpus % teacher_shards or student_gpus % job.config.engine.vllm.tensor_parallel:
        return
    for rollout_shards in _shards(job.config.engine.vllm.tensor_parallel, student_gpus // student_nodes):
        memory = student_memory(job, student_gpus, rollout_shards, settings.sequence_parallel)
        update, writing, cache = _student_needs(job, gpu, memory, rollout_shards, settings.offload)
        yield Layout(
            "verl",
            gpu,
            nodes,
            gpus_per_node,
            student_gpus,
            student_nodes,
            teacher_gpus,
            rollout_shards,
            teacher_shards,
            (update, writing, teacher),
            cache,
            (gpu.memory / 1.1 - (0.0 if settings.offload else memory.resident)) / gpu.memory,
        )
        if writing.verdict != "no":
            break


def _shards(least: int, most: int) -> list[int]:
    """Sizes of a tensor-parallel group: from the configured one upwards, divisors of a machine's GPUs."""
    return [size for size in range(least, most + 1) if most % size == 0 and size & (size - 1) == 0] or [least]


def student_memory(job: Job, gpus: int, rollout_shards: int, sequence_parallel: int) -> StepMemory:
    """On one of the student's GPUs in verl: everything sharded, whole logits, an engine with its own copy."""
    return step_memory(
        job.student.config,
        micro_batch_tokens=-(-job.micro_batch // sequence_parallel),
        cached_tokens=0,
        weight_bytes=job.weight_bytes,
        compute_bytes=job.compute_bytes,
        reference_bytes=job.reference_bytes,
        gradient_checkpointing=job.config.optim.gradient_checkpointing,
        shards=gpus,
        gathers=True,
        logits_bytes=2 * job.compute_bytes,
        engine_bytes=job.engine_bytes,
        engine_shards=rollout_shards,
        counted=job.student.count,
    )


def _student_needs(job: Job, gpu: Gpu, memory: StepMemory, shards: int, offload: bool) -> tuple[Need, Need, float]:
    share = job.config.engine.vllm.memory_share
    row = job.longest * cache_elements(job.student.config) * job.engine_bytes / shards
    resident = 0.0 if offload else memory.resident
    cache = max(0.0, share * gpu.memory - memory.engine - ENGINE_WORKING)
    update = Need(
        "student, update",
        memory.update,
        gpu.memory,
        {
            "weights": memory.weights,
            "Adam": memory.adam,
            "gradients": memory.gradients,
            "reference": memory.reference,
            "activations": memory.activations,
            "logits": memory.head,
            "gathered layers": memory.gathered,
        },
        "use more GPUs for the student, larger ones, or cluster.sequence_parallel; lower optim.token_budget and "
        "rollout.max_tokens; or set cluster.offload = true",
    )
    parts = {"training state": resident, "engine's weights": memory.engine, "working": ENGINE_WORKING}
    if cache < row:  # not even one longest answer: the share is too small
        needed, available = memory.engine + ENGINE_WORKING + row, share * gpu.memory
        way_out = f"raise engine.vllm.memory_share (now {share:g}) or engine.vllm.tensor_parallel, or lower rollout.max_tokens"
        writing = Need("student, rollouts", needed, available, parts | {"one longest answer": row}, way_out, 1.0)
    else:
        needed = resident + share * gpu.memory
        way_out = f"lower engine.vllm.memory_share (now {share:g}), set cluster.offload = true, or give the student more GPUs"
        writing = Need("student, rollouts", needed, gpu.memory, parts | {"cache": cache}, way_out, 1.05)
    return update, writing, shards * cache / (cache_elements(job.student.config) * job.engine_bytes)


def teacher_need(job: Job, gpu: Gpu, shards: int, share: float) -> Need:
    """On one of the teacher's GPUs: weights and the cache of one longest sequence in the engine's share; the logits outside."""
    teacher = job.teacher
    assert teacher is not None
    weights = teacher.count.total * job.teacher_bytes / shards
    row = (job.longest + 1) * cache_elements(teacher.config) * job.teacher_bytes / shards
    logits = SCORED_TOKENS * int(teacher.config.get_text_config().vocab_size) * SCORED_BYTES
    inside = weights + row + ENGINE_WORKING
    parts = {"weights": weights, "one longest answer": row, "logits": logits, "working": ENGINE_WORKING}
    way_out = (
        f"raise cluster.teacher_tensor_parallel (here {shards}) or cluster.teacher_memory_share (now {share:g}), "
        "or use larger GPUs"
    )
    if inside > share * gpu.memory:
        return Need("teacher", inside, share * gpu.memory, parts, way_out, 1.0)
    return Need("teacher", inside + logits, gpu.memory, parts, way_out, 1.05)


def local_layout(job: Job, gpu: Gpu) -> Layout:
    """One GPU, this package's trainer: student and teacher together, unless the teacher is elsewhere."""
    config = job.config
    elsewhere = job.teacher is None or config.models.teacher_device is not None
    frozen = {"none": float(job.weight_bytes), "8bit": 1.0, "4bit": 0.55}[config.lora.quantize]
    own_engine = job.engine_weights == "copy"
    here = job.engine_weights != "elsewhere"
    memory = step_memory(
        job.student.config,
        None if elsewhere or job.teacher is None else job.teacher.config,
        micro_batch_tokens=job.micro_batch,
        cached_tokens=job.longest if here else 0,
        weight_bytes=frozen,
        compute_bytes=job.compute_bytes,
        teacher_bytes=job.teacher_bytes,
        trained=job.trained,
        reference_bytes=job.reference_bytes,
        gradient_checkpointing=config.optim.gradient_checkpointing,
        engine_bytes=job.engine_bytes if own_engine else 0,
        counted=job.student.count,
    )
    per_token = cache_elements(job.student.config) * job.compute_bytes
    free = gpu.memory / MARGIN - memory.resident
    room = (config.engine.vllm.memory_share * gpu.memory - memory.engine - ENGINE_WORKING) if own_engine else free / 2
    cache = max(room, 0.0)
    needed = memory.total if here else memory.update
    if own_engine:  # it keeps its share through the update, unless it sleeps
        share = config.engine.vllm.memory_share * gpu.memory
        needed = max(memory.update, memory.resident + share) if config.engine.vllm.sleep else memory.update + share
    need = Need(
        "the GPU",
        needed,
        gpu.memory,
        {
            "weights": memory.weights,
            "Adam": memory.adam,
            "teacher": memory.teacher,
            "reference": memory.reference,
            "gradients": memory.gradients,
            "activations": memory.activations,
            "head": memory.head,
            "one longest answer": memory.kv_cache,
            "engine's weights": memory.engine,
        },
        "train an adapter (--lora.rank 16, with --lora.quantize 4bit if need be), put the teacher behind a server "
        "(teacher.urls), lower optim.token_budget or rollout.max_tokens, or use more GPUs (--gpus-per-node)",
    )
    return Layout("local", gpu, 1, 1, 1, 1, 0, 1, 1, (need,), max(cache / per_token, float(job.longest)), free / gpu.memory)

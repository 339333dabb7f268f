"""A recipe and the shapes of its models: what each device has to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from iwopd.config import Config
from iwopd.config.engines import engine_type
from iwopd.rollout.local import CACHE_BYTES_CPU
from iwopd.rollout.settings import VllmSettings
from iwopd.train.memory.shapes import ModelShape
from iwopd.train.memory.step import NO_WRITER, StepMemory, Stored, TrainedModel, WriterMemory, device_memory

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"8bit": 1.0, "4bit": 0.55}
"""Of a parameter in a quantised matrix, scales included."""
ENGINE_WORKING = 2e9
"""Bytes of a vLLM engine besides weights and cache: activations of a batch, CUDA graphs. An assumption."""
SCORED_TOKENS, SCORED_BYTES = 8192, 6
"""Tokens whose logits vLLM makes at once for prompt log-probs (verl's default `max_num_batched_tokens`), and bytes of each
logit: a bfloat16 and a float32 copy (docs/plan.md)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunShape:
    """A run, as far as its memory is concerned."""

    config: Config
    student: ModelShape
    teachers: Mapping[str, ModelShape]
    """Those that the run loads itself, by name; one behind servers takes no memory here."""
    reference: ModelShape | None
    """Where it is a model of its own, not the student without its adapter."""
    longest: int
    """Tokens of the longest prompt and answer together."""

    @property
    def rollouts(self) -> int:
        """Of one step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.samples

    @property
    def micro_batch(self) -> int:
        """Tokens of the largest micro-batch: the budget, but at least one whole rollout."""
        return max(self.longest, min(self.config.optim.token_budget, self.rollouts * self.longest))

    @property
    def weight_bytes(self) -> int:
        return DTYPE_BYTES[self.config.models.dtype]

    @property
    def compute_bytes(self) -> int:
        """Of activations."""
        return 2 if self.config.precision == "bf16" else self.weight_bytes

    @property
    def teacher_bytes(self) -> int:
        return DTYPE_BYTES[self.config.models.teacher_dtype or self.config.models.dtype]

    def teacher_share(self, gpus: int) -> float:
        """The part of each teacher that `models.teacher_device` puts beside the student, on a machine with so many GPUs."""
        device = self.config.models.teacher_device
        if device == "auto" and gpus:
            return 1 / gpus
        same = ("cuda", "cuda:0") if gpus else ("cpu", "auto")
        return 1.0 if device is None or device in same else 0.0

    @property
    def vllm(self) -> VllmSettings:
        """Settings of a rollout engine with its own copy of the student, here or on verl."""
        return self.config.engine.vllm

    @property
    def writer(self) -> Literal["sampler", "engine", "elsewhere"]:
        """Who writes with the local trainer: its own sampler, an engine with its own copy of the student, a server."""
        weights = engine_type(self.config.rollout.engine).weights
        return "sampler" if weights == "student" else "engine" if weights == "copy" else "elsewhere"

    def writing_bytes(self, trainer: Literal["local", "verl"]) -> int:
        """Of a number in the writer's weights and cache; verl's engine follows `precision`, the local trainer's do not."""
        if trainer == "local" and self.writer == "sampler":
            return self.weight_bytes
        half = trainer == "verl" and self.config.precision == "bf16"
        return DTYPE_BYTES[self.vllm.dtype or ("bfloat16" if half else self.config.models.dtype)]

    @cached_property
    def _trained(self) -> TrainedModel:
        lora = self.config.lora
        return TrainedModel(
            self.student,
            number_bytes=self.weight_bytes,
            compute_bytes=self.compute_bytes,
            adapter=self.student.adapter_parameters(lora) if lora.rank else 0,
            quantized_bytes=QUANTIZED_BYTES.get(lora.quantize),
            gradient_checkpointing=self.config.optim.gradient_checkpointing,
        )

    def on_one_device(self, *, gpus: int = 1, memory: float = 0.0) -> StepMemory:
        """The local trainer's device, which holds student, teachers and reference.

        gpus: that the process sees; 0: it runs on a CPU. memory: bytes of the GPU, of which an engine takes its share.
        Of the sampler's cache, a GPU must hold one row: more are under way if there is room. A CPU's has a fixed budget.
        """
        share = self.teacher_share(gpus)
        return device_memory(
            self._trained,
            self.micro_batch,
            teachers=tuple(Stored(teacher, self.teacher_bytes, share) for teacher in self.teachers.values()),
            reference=None if self.reference is None else Stored(self.reference, self.weight_bytes),
            on_gpu=gpus > 0,
            writer=self._writer(gpus > 0, memory),
        )

    def _writer(self, on_gpu: bool, memory: float) -> WriterMemory:
        if self.writer == "elsewhere":
            return NO_WRITER
        row = self.longest * self.student.cache_elements * self.writing_bytes("local")
        if self.writer == "sampler":
            return WriterMemory(cache=row * (1 if on_gpu else max(1, min(self.rollouts, CACHE_BYTES_CPU // row))))
        weights = Stored(self.student, self.writing_bytes("local")).weights
        working = ENGINE_WORKING if on_gpu else 0.0
        room = self.vllm.memory_share * memory - weights - working if on_gpu else 2**30
        cache = max(room, row) if self.vllm.cache_gb is None else self.vllm.cache_gb * 2**30
        return WriterMemory(weights, working, cache, stays=not self.vllm.sleep)

    def on_verl(self, *, gpus: int, engine_shards: int, gpu_memory: float) -> StepMemory:
        """One of the student's `gpus` GPUs on verl, with rollout engines of `engine_shards` GPUs that sleep in the update."""
        weights = Stored(self.student, self.writing_bytes("verl"), 1 / engine_shards).weights
        room = self.vllm.memory_share * gpu_memory - weights - ENGINE_WORKING
        return device_memory(
            self._trained,
            -(-self.micro_batch // self.config.cluster.sequence_parallel),
            reference=None if self.reference is None else Stored(self.reference, self.weight_bytes, 1 / gpus),
            shards=gpus,
            on_verl=True,
            writer=WriterMemory(weights, ENGINE_WORKING, max(0.0, room)),
            offloaded=self.config.cluster.offload,
        )

    def scoring_on_verl(self, teacher: ModelShape, shards: int) -> dict[str, float]:
        """Bytes by part on one of the `shards` GPUs of a teacher's copy on verl; the logits lie outside the engine's share.

        The teacher writes one token after the longest answer.
        """
        return {
            "weights": Stored(teacher, self.teacher_bytes, 1 / shards).weights,
            "one longest answer": (self.longest + 1) * teacher.cache_elements * self.teacher_bytes * (1 / shards),
            "engine's working": ENGINE_WORKING,
            "logits": SCORED_TOKENS * teacher.vocabulary * SCORED_BYTES,
        }

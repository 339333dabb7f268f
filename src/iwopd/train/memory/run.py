"""A recipe and the shapes of its models: what each device has to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from iwopd.config import Config
from iwopd.config.engines import engine_type
from iwopd.devices import CACHE_BYTES_CPU
from iwopd.lean_model import COPY_BYTES
from iwopd.rollout.horizons import Budget
from iwopd.rollout.local import PREFILL_TOKENS
from iwopd.rollout.sampling import CHUNK_ELEMENTS
from iwopd.rollout.settings import VllmSettings
from iwopd.teacher.following import CACHE_SHARE
from iwopd.teacher.local import TOKEN_BUDGET_CPU, TOKEN_BUDGET_GPU
from iwopd.train.kept_states import keeps_others_states, keeps_states, kept_bytes
from iwopd.train.memory.shapes import ModelShape
from iwopd.train.memory.step import NO_WRITER, DeviceMemory, StepMemory, Stored, Tokens, TrainedModel, WriterMemory
from iwopd.train.mix import mix_needs_states
from iwopd.train.teachers import scores_early

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"8bit": 1.0, "4bit": 0.55, "int8": 1.0}
"""Of a parameter in a quantised matrix, scales included."""
FOLLOWED_SHARE = CACHE_SHARE
"""Of a GPU's free memory: most that the cache of a teacher takes which follows answers."""
CACHE_SLACK = 1.1
"""Most that the sampler's cache takes of its budget: rows come and go beside each other."""
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
    """Those that the run loads itself, by name; one behind servers takes no memory here, nor does the student as its own."""
    reference: ModelShape | None
    """Where it is a model of its own, not the student without its adapter."""
    longest: int
    """Tokens of the longest prompt and answer together."""

    @property
    def rollouts(self) -> int:
        """Of one step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.samples

    @property
    def follows(self) -> bool:
        """Whether the teacher scores answers while they are written, to stop some of them."""
        return self.config.rollout.horizon.made.stops_online

    @property
    def _most_tokens(self) -> int:
        """Of a step: all rollouts to the end, or what its horizon may spend, if that is more."""
        return max(self.rollouts * self.longest, self.config.rollout.horizon.made.tokens_per_step or 0)

    @property
    def micro_batch(self) -> int:
        """Tokens of the largest micro-batch: the budget, but at least one whole rollout."""
        return self._batch(self.config.optim.token_budget, ranks=1)

    def _batch(self, budget: int, ranks: int) -> int:
        """Tokens of the largest batch of a rank's rollouts within a budget."""
        mine = -(-self.config.rollout.prompts_per_step // ranks) * self.config.rollout.samples * self.longest
        spent = -(-(self.config.rollout.horizon.made.tokens_per_step or 0) // ranks)
        return max(self.longest, min(budget, max(mine, spent)))

    @property
    def weight_bytes(self) -> int:
        return DTYPE_BYTES[self.config.models.dtype]

    @property
    def compute_bytes(self) -> int:
        """Of a number in matrix products."""
        return DTYPE_BYTES[self.config.compute_dtype]

    @property
    def teacher_bytes(self) -> int:
        return DTYPE_BYTES[self.config.models.teacher_dtype or self.config.models.dtype]

    @property
    def scoring(self) -> Mapping[str, ModelShape]:
        """Models that score as teachers in this process, by name: those that it loads, and the student as its own."""
        own = {"teacher": self.student} if self.config.teacher.is_student else {}
        return {**own, **self.teachers}

    def teacher_share(self, gpus: int) -> float:
        """The part of each teacher that `models.teacher_device` puts beside the student, on a machine with so many GPUs."""
        return self._share(self.config.models.teacher_device, gpus)

    def average_share(self, gpus: int) -> float:
        """The part of the student's moving average that lies beside it: all, or nothing."""
        return self._share(self.config.ema.device, gpus) if self.config.keeps_average else 0.0

    def _share(self, device: str | None, gpus: int) -> float:
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
        """Of a number in the writer's weights and cache: all follow `precision`, unless an engine is told otherwise."""
        if trainer == "local" and self.writer == "sampler":
            return self.compute_bytes
        return DTYPE_BYTES[self.vllm.dtype or self.config.compute_dtype]

    @property
    def _autocast(self) -> bool:
        return self.config.precision == "bf16"

    @cached_property
    def _trained(self) -> TrainedModel:
        lora = self.config.lora
        return TrainedModel(
            self.student,
            number_bytes=self.weight_bytes,
            autocast=self._autocast,
            adapter=self.student.adapter_parameters(lora) if lora.rank else 0,
            adapter_rank=lora.rank,
            quantized_bytes=QUANTIZED_BYTES.get(lora.quantize),
            gradient_checkpointing=self.config.optim.gradient_checkpointing,
        )

    def on_one_device(self, *, gpus: int = 1, memory: float = 0.0, ranks: int = 1) -> StepMemory:
        """The device of one of the local trainer's `ranks` processes, which holds student, teachers and reference.

        gpus: that the process sees; 0: it runs on a CPU. memory: bytes of the GPU, of which an engine takes its share.
        Of the sampler's cache, a GPU must hold one row: more are under way if there is room. A CPU's has a fixed budget.
        """
        return DeviceMemory(
            student=self._trained,
            tokens=self._tokens(gpus > 0, self.scoring_share(gpus), ranks),
            teachers=self._teachers(self.teacher_share(gpus)),
            reference=None if self.reference is None else Stored(self.reference, self.weight_bytes, autocast=self._autocast),
            shards=ranks if self.config.optim.shard else 1,
            on_gpu=gpus > 0,
            writer=self._writer(gpus > 0, memory, ranks),
            whole_distributions=self.config.method.made.needs_teacher_distribution or mix_needs_states(self.config),
            kept=0.0 if gpus else self.kept(ranks),
            averaged=self.average_share(gpus) > 0,
            followed=self._followed(gpus > 0, ranks, self.scoring_share(gpus)),
            teachers_leave=gpus > 0 and self.config.models.teacher_offload,
        ).step

    def scoring_share(self, gpus: int) -> float:
        """The part of the first teacher that lies beside the student, whoever it is."""
        if self.config.teacher.is_student:
            return self.average_share(gpus) if self.config.teacher.source == "ema" else 1.0
        return self.teacher_share(gpus)

    def kept(self, ranks: int = 1) -> float:
        """Bytes that a step keeps of its tokens in main memory beside log-probs."""
        state = max((teacher.hidden for teacher in self.scoring.values()), default=0) * self.teacher_bytes
        tokens, made, again = self._most_tokens, self.config.method.made, self.config.teacher_stays
        of_others = mix_needs_states(self.config) and not made.needs_teacher_distribution
        kept = of_others and keeps_others_states(made, own=False, again=again, most=tokens * state, ranks=ranks)
        own = kept_bytes(made, tokens=tokens, state=state, ranks=ranks, again=again)
        return own + (2.0 * tokens * state if kept else 0.0)

    def teacher_reads_again(self, ranks: int = 1) -> bool:
        """Whether the teacher reads every micro-batch of the update once more: whole distributions, and no room for states."""
        made = self.config.method.made
        state = max((teacher.hidden for teacher in self.scoring.values()), default=0) * self.teacher_bytes
        kept = keeps_states(made, again=self.config.teacher_stays, most=self._most_tokens * state, ranks=ranks)
        return made.needs_teacher_distribution and not kept

    def in_main_memory(self, ranks: int) -> float:
        """Bytes that the processes of a machine have on its CPU while they train on GPUs: teachers, and what steps keep."""
        kept = ranks * self.kept(ranks)
        if self.config.keeps_average and self.config.ema.device == "cpu":
            read = self._batch(TOKEN_BUDGET_CPU, ranks) * self._trained.on_its_way.reading
            cached = self._followed(on_gpu=False, ranks=ranks, share=1.0) or 0.0
            kept += ranks * (self._trained.average + read + cached)
        if self.config.models.teacher_offload:
            return kept + ranks * sum(teacher.weights for teacher in self._teachers(1.0))
        if self.config.models.teacher_device != "cpu":
            return kept
        teachers, tokens = self._teachers(1.0), self._batch(TOKEN_BUDGET_CPU, ranks)
        scoring = max((tokens * teacher.reading for teacher in teachers), default=0.0)
        followed = self._followed(on_gpu=False, ranks=ranks, share=1.0) or 0.0
        return kept + ranks * (sum(teacher.weights for teacher in teachers) + scoring + followed)

    def _teachers(self, share: float) -> tuple[Stored, ...]:
        quantized = QUANTIZED_BYTES.get(self.config.models.teacher_quantize)
        return tuple(
            Stored(teacher, self.teacher_bytes, share, quantized_bytes=quantized) for teacher in self.teachers.values()
        )

    def _tokens(self, on_gpu: bool, teacher_share: float, ranks: int) -> Tokens:
        optim, here = self.config.optim, bool(self.scoring) and teacher_share > 0
        alone = optim.ppo_epochs == optim.mini_batches == ranks == 1
        return Tokens(
            update=self._batch(optim.token_budget, ranks),
            scores=self._batch(TOKEN_BUDGET_GPU if on_gpu else TOKEN_BUDGET_CPU, ranks),
            waiting=alone and self._most_tokens <= optim.token_budget,
            early=here and (self.follows or scores_early(self.config)),
        )

    def _writer(self, on_gpu: bool, memory: float, ranks: int) -> WriterMemory:
        if self.writer == "elsewhere":
            return NO_WRITER
        size = self.writing_bytes("local")
        row = self.longest * self.student.cache_elements * size
        if self.writer == "sampler":
            return self._sampler(CACHE_SLACK * row, on_gpu, ranks)
        weights = Stored(self.student, size).weights
        working = ENGINE_WORKING if on_gpu else 0.0
        room = self.vllm.memory_share * memory - weights - working if on_gpu else 2**30
        cache = max(room, row) if self.vllm.cache_gb is None else self.vllm.cache_gb * 2**30
        return WriterMemory(weights, working, cache, stays=not self.vllm.sleep)

    def _sampler(self, row: float, on_gpu: bool, ranks: int) -> WriterMemory:
        """row: bytes of the longest rollout's cache."""
        student, count = self._trained, self.student.count
        rows = self._rows(ranks)
        copies = student.on_its_way.copies
        laid_out = self.weight_bytes * (count.layers + count.head)  # small matrices are laid out anew for single tokens
        drawn = min(rows * self.student.vocabulary, CHUNK_ELEMENTS)
        return WriterMemory(
            weights=copies or (laid_out if laid_out <= COPY_BYTES else 0.0),
            # Prompts are read together, then a token of every row is drawn: logits, probabilities, their sums in float64.
            working=max(self._batch(PREFILL_TOKENS, ranks) * student.on_its_way.reading, 20.0 * drawn),
            cache=row * (1 if on_gpu else max(1, min(rows, CACHE_SLACK * CACHE_BYTES_CPU // row))),
        )

    def _rows(self, ranks: int) -> int:
        """Most rollouts of a process. A budget of tokens may go to as many as there are shortest ones in it: a block each."""
        rows = -(-self.config.rollout.prompts_per_step // ranks) * self.config.rollout.samples
        horizon = self.config.rollout.horizon.made
        return max(rows, -(-horizon.tokens // (ranks * horizon.block))) if isinstance(horizon, Budget) else rows

    @property
    def followed_token(self) -> float:
        """Bytes of a token in the cache of a teacher that follows answers; an answer's columns double, so half may be empty."""
        return 2.0 * max((teacher.cache_elements for teacher in self.scoring.values()), default=0) * self.teacher_bytes

    def _followed(self, on_gpu: bool, ranks: int, share: float) -> float | None:
        """Bytes of that cache, bounded as the sampler's is: a GPU must hold one answer, a CPU's cache has a budget."""
        if not (self.follows and self.scoring and share):
            return None
        row = share * self.longest * self.followed_token
        return row * (1 if on_gpu else max(1, min(self._rows(ranks), CACHE_BYTES_CPU // row)))

    def on_verl(self, *, gpus: int, engine_shards: int, gpu_memory: float) -> StepMemory:
        """One of the student's `gpus` GPUs on verl, with rollout engines of `engine_shards` GPUs that sleep in the update."""
        weights = Stored(self.student, self.writing_bytes("verl"), 1 / engine_shards).weights
        room = self.vllm.memory_share * gpu_memory - weights - ENGINE_WORKING
        return DeviceMemory(
            student=self._trained,
            tokens=Tokens(update=-(-self.micro_batch // self.config.cluster.sequence_parallel)),
            reference=None if self.reference is None else Stored(self.reference, self.weight_bytes, 1 / gpus),
            shards=gpus,
            on_verl=True,
            writer=WriterMemory(weights, ENGINE_WORKING, max(0.0, room)),
            offloaded=self.config.cluster.offload,
        ).step

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

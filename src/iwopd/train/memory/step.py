"""From what one device holds and computes in a step to bytes by part, stage by stage. The arithmetic in words: docs/gpu.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from iwopd.algo.agreement import working_bytes
from iwopd.algo.head import CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS_GPU
from iwopd.train.memory.passes import LOSS_BYTES, Pass
from iwopd.train.memory.shapes import ModelShape

GB = 1e9
MASTER_BYTES = 4
"""Adam's moments, gradients and the weights that an optimizer step changes are float32, whatever the model's precision: half
precision has copies for it (masters), and an adapter is float32 from the start."""

Stage = Literal["rollouts", "scores", "forward pass", "loss", "backward pass"]
UPDATE: tuple[Stage, ...] = ("forward pass", "loss", "backward pass")
Parts = dict[str, float]


@dataclass(frozen=True)
class Stored:
    """A model that is only read: a teacher, the reference, the rollout engine's copy of the student."""

    shape: ModelShape
    number_bytes: int
    """Of a parameter."""
    share: float = 1.0
    """The part of it that lies on this device."""
    autocast: bool = False
    """It computes in bfloat16."""
    quantized_bytes: float | None = None
    """Of a parameter in the layers' matrices, where these are quantised."""

    @property
    def weights(self) -> float:
        count, matrices = self.shape.count, self.quantized_bytes or self.number_bytes
        return (count.layers * matrices + (count.total - count.layers) * self.number_bytes) * self.share

    @property
    def matrix(self) -> float:
        """Of its output matrix."""
        return self.shape.count.head * self.number_bytes * self.share

    @property
    def on_its_way(self) -> Pass:
        return Pass(self.shape, self.number_bytes, self.autocast)

    @property
    def reading(self) -> float:
        """Bytes a token, where it is scored; one that is spread over devices has each layer on one of them."""
        return self.on_its_way.reading if self.share else 0.0


@dataclass(frozen=True)
class TrainedModel:
    """The trained model: how its weights are stored, computed with and updated."""

    shape: ModelShape
    number_bytes: int = 4
    """Of a parameter as it is loaded."""
    autocast: bool = True
    """The forward pass computes in bfloat16."""
    adapter: int = 0
    """Parameters of the LoRA adapter; 0: all weights are trained."""
    adapter_rank: int = 0
    quantized_bytes: float | None = None
    """Of a parameter in the layers' matrices, where these are quantised."""
    gradient_checkpointing: bool = True

    @property
    def weights(self) -> float:
        count, matrices = self.shape.count, self.quantized_bytes or self.number_bytes
        return count.layers * matrices + (count.total - count.layers) * self.number_bytes + MASTER_BYTES * self.adapter

    @property
    def trained(self) -> float:
        """Bytes of a float32 number for every trained parameter."""
        return MASTER_BYTES * (self.adapter or self.shape.count.total)

    @property
    def average(self) -> float:
        """Bytes of a moving average: of half precision, in float32 and as the model that scores."""
        rounded = self.number_bytes * self.shape.count.total if self.has_masters else 0.0
        return self.trained + rounded

    @property
    def has_masters(self) -> bool:
        return self.number_bytes < MASTER_BYTES and not self.adapter

    @cached_property
    def on_its_way(self) -> Pass:
        return Pass(self.shape, self.number_bytes, self.autocast, self.adapter_rank)

    def copies(self, *, kept: bool) -> float:
        """Of matrices in autocast's precision. kept: those of all layers are, else only the one at work has them.

        Autocast itself keeps those of trained weights until a pass ends.
        """
        return self.on_its_way.copies if kept else self.on_its_way.copies_of_one_layer


@dataclass(frozen=True)
class WriterMemory:
    """Bytes of what writes the rollouts on this device."""

    weights: float = 0.0
    """Its own copy of the student, or of some of its matrices in another precision."""
    working: float = 0.0
    cache: float = 0.0
    """Keys and values of the rollouts under way."""
    stays: bool = False
    """It keeps all of this through the update."""

    @property
    def parts(self) -> Parts:
        return {"writer's weights": self.weights, "writer's working": self.working, "cache": self.cache}

    @property
    def total(self) -> float:
        return self.weights + self.working + self.cache


NO_WRITER = WriterMemory()


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step on one device, by what they hold."""

    state: Parts
    """What outlives a stage: weights, Adam's moments, and the models that score."""
    stages: Mapping[Stage, Parts]
    """What comes on top of it, one stage after the other."""
    writer: WriterMemory
    checkpoint: float
    """Bytes of a checkpoint."""
    offloaded: bool = False
    """The training state leaves the device while rollouts are written."""

    def parts_of(self, stage: Stage) -> Parts:
        """By name, those of 0 bytes, too."""
        state = {} if self.offloaded and stage == "rollouts" else self.state
        return state | self.stages[stage]

    def needed(self, *stages: Stage) -> float:
        """Of the largest of these stages."""
        return max(sum(self.parts_of(stage).values()) for stage in stages)

    def largest(self, *stages: Stage) -> Stage:
        """Of these; without a name, of all."""
        return max(stages or tuple(self.stages), key=lambda stage: self.needed(stage))

    @property
    def parts(self) -> Parts:
        """Of the largest stage."""
        return self.parts_of(self.largest())

    @property
    def total(self) -> float:
        return self.needed(*self.stages)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What is read at a time."""

    update: int
    """Of a micro-batch."""
    scores: int = 0
    """Of the largest batch that is scored on this device; 0: nothing is."""
    waiting: bool = False
    """The update's own forward pass gives the old log-probs, and waits while others score."""
    early: bool = False
    """The teacher here scores rollouts while others, or they themselves, are being written."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What one device holds and computes in a step. `step` adds it up.

    Weights, gradients and moments are spread over `shards` devices, and what is needed of them is gathered for the moment.
    Here the head is fused and autocast computes; verl has no autocast copies and a whole matrix of logits.
    """

    student: TrainedModel
    tokens: Tokens
    teachers: tuple[Stored, ...] = ()
    reference: Stored | None = None
    shards: int = 1
    on_gpu: bool = True
    on_verl: bool = False
    writer: WriterMemory = NO_WRITER
    offloaded: bool = False
    whole_distributions: bool = False
    """The loss compares whole distributions: the teacher reads every micro-batch, too, unless its states were kept."""
    kept: float = 0.0
    """Bytes that a step keeps of its tokens beside log-probs, where main memory is the device's."""
    teachers_leave: bool = False
    """Teachers are here only while they score; of one whose whole distributions are compared the output matrix stays."""
    averaged: bool = False
    """The moving average of the trained weights lies here, and scores."""
    followed: float | None = None
    """The teacher's cache of the answers that it follows while they are written; None: it follows none."""

    @property
    def step(self) -> StepMemory:
        student = self.student
        masters = student.trained if student.has_masters else 0.0
        split = masters and (self.shards > 1 or self.on_verl)  # what is gathered, rounded, are the masters themselves
        state = {
            "weights": (masters if split else student.weights) / self.shards,
            "masters": 0.0 if split else masters / self.shards,
            "adam": 2 * student.trained / self.shards,
            "teachers": self._resting if self.teachers_leave else sum(teacher.weights for teacher in self.teachers),
            "reference": 0.0 if self.reference is None else self.reference.weights,
            "kept evidence": self.kept,
        }
        if self.averaged:
            state["average"] = student.average
        stages: dict[Stage, Parts] = {"rollouts": self._rollouts, "scores": self._scores}
        stages |= {stage: self._update(stage) for stage in UPDATE}
        written = MASTER_BYTES * student.adapter or student.weights
        checkpoint = written + masters + 2 * student.trained + (student.trained if self.averaged else 0.0)
        return StepMemory(state, stages, self.writer, checkpoint, self.offloaded)

    @property
    def _resting(self) -> float:
        """Of teachers that have left."""
        return sum(teacher.matrix for teacher in self.teachers) if self.whole_distributions else 0.0

    @property
    def _at_work(self) -> Parts:
        """Teachers that have come back: in place of what stays of them."""
        if not self.teachers_leave:
            return {}
        return {"teachers": self._resting + sum(teacher.weights for teacher in self.teachers)}

    @property
    def _whole(self) -> Parts:
        """Sampler and scorer of this package work with the whole student, also where the update does not."""
        return {"whole student": self.student.weights} if self.shards > 1 and not self.on_verl else {}

    @property
    def _pass(self) -> Pass:
        """On verl nothing is rounded under way: the gathered weights have the precision of the products."""
        own = self.student.on_its_way
        return Pass(own.shape, own.compute_bytes) if self.on_verl else own

    @property
    def _rollouts(self) -> Parts:
        following = {} if self.followed is None else {"teacher's cache": self.followed}
        early = self._scoring | self._at_work if self.tokens.early else {}
        return self._whole | self.writer.parts | early | following

    @property
    def _scores(self) -> Parts:
        parts = self._whole | self._scoring | self._at_work | (self.writer.parts if self.writer.stays else {})
        if self.tokens.waiting:
            parts["activations"] = self.tokens.update * self._pass.kept(self.student.gradient_checkpointing)
        return parts

    @property
    def _scoring(self) -> Parts:
        """Without gradients: student, teachers and reference one after the other, each its layers and then its head."""
        tokens, student = self.tokens.scores, self.student
        if not tokens:
            return {"scoring": 0.0}
        passes = [(student.on_its_way, student.copies(kept=not student.adapter))]
        others = [other.on_its_way for other in (*self.teachers, self.reference) if other and other.share]
        passes += [(one, one.copies) for one in others]
        head = self._logits(tokens)
        return {"scoring": max(copies + max(tokens * one.reading, tokens * one.states + head) for one, copies in passes)}

    def _logits(self, tokens: int) -> float:
        """Those that exist at one time: of a few tokens, and up to two buffers beside them."""
        budget = CHUNK_ELEMENTS_GPU if self.on_gpu else CHUNK_ELEMENTS_CPU
        return 4.0 * min(3 * tokens * self.student.shape.vocabulary, budget)

    def _update(self, stage: Stage) -> Parts:
        student, one, tokens = self.student, self._pass, self.tokens.update
        checkpointing, count = student.gradient_checkpointing, student.shape.count
        # Checkpointing lets the copies in the graph go; those of trained weights stay until the forward pass ends.
        kept = not checkpointing or (stage == "forward pass" and not student.adapter)
        output = 0.0 if student.adapter else 4.0 * count.head  # the gradient of the output matrix, summed up in float32
        activations, head = float(tokens * one.kept(checkpointing)), 0.0
        if stage == "forward pass":
            reading = max([one.reading, *(teacher.reading for teacher in self.teachers if self.whole_distributions)])
            activations += tokens * reading
        elif stage == "loss":
            logits = 2 * tokens * student.shape.vocabulary * one.compute_bytes if self.on_verl else self._logits(tokens)
            activations += tokens * LOSS_BYTES * student.shape.hidden
            head = logits + output
        else:
            # At its end the embedding has a gradient of its own, which joins that of the output matrix.
            activations = max(float(tokens * one.backward(checkpointing)), output)
            if not student.adapter:
                activations += (one.compute_bytes + MASTER_BYTES) * count.largest_tensor  # a gradient before it is added
            head = output
        if not self.on_verl:
            head += working_bytes(tokens, student.shape.hidden)
        parts = {
            "gradients": student.trained / self.shards,
            "autocast copies": 0.0 if self.on_verl else student.copies(kept=kept),
            "activations": activations,
            "head": head,
            "gathered layers": self._gathered,
        }
        return parts | (self.writer.parts if self.writer.stays else {})

    @property
    def _gathered(self) -> float:
        """What FSDP makes whole for the moment: embedding, output matrix and two layers, with their gradients."""
        if self.shards == 1 and not self.on_verl:
            return 0.0
        student, count = self.student, self.student.shape.count
        size = self._pass.compute_bytes if self.on_verl else student.number_bytes
        return (1 if student.adapter else 2) * size * float(count.outside + 2 * count.largest_layer)

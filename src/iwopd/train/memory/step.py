"""From what one device holds and computes in a step to bytes by part. The arithmetic in words: docs/gpu.md."""

from __future__ import annotations

from dataclasses import dataclass, fields

from iwopd.algo.head import CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS_GPU
from iwopd.train.memory.shapes import ModelShape

GB = 1e9
ADAPTER_BYTES = 4
"""An adapter is trained in float32, whatever the model's precision."""


@dataclass(frozen=True)
class Stored:
    """A model that is only read: a teacher, the reference, the rollout engine's copy of the student."""

    shape: ModelShape
    number_bytes: int
    """Of a parameter."""
    share: float = 1.0
    """The part of it that lies on this device."""

    @property
    def weights(self) -> float:
        return self.shape.count.total * self.number_bytes * self.share


@dataclass(frozen=True)
class TrainedModel:
    """The trained model: how its weights are stored, computed with and updated."""

    shape: ModelShape
    number_bytes: int = 4
    """Of a parameter as it is loaded."""
    compute_bytes: int = 2
    """Of a number in the forward pass: under autocast less than `number_bytes`."""
    adapter: int = 0
    """Parameters of the LoRA adapter; 0: all weights are trained."""
    quantized_bytes: float | None = None
    """Of a parameter in the layers' matrices, where these are quantised."""
    gradient_checkpointing: bool = True

    @property
    def weights(self) -> float:
        count, matrices = self.shape.count, self.quantized_bytes or self.number_bytes
        return count.layers * matrices + (count.total - count.layers) * self.number_bytes + ADAPTER_BYTES * self.adapter

    @property
    def gradients(self) -> float:
        """Gradients have the dtype of the trained weights. So has each of AdamW's two moments."""
        return ADAPTER_BYTES * self.adapter if self.adapter else self.number_bytes * self.shape.count.total

    @property
    def autocast_copies(self) -> float:
        """The layers' matrices in the precision that autocast computes in, kept for the backward pass.

        Frozen ones are made again with each checkpointed layer, so that only those of one layer exist at a time.
        """
        if self.compute_bytes >= self.number_bytes:
            return 0.0
        one_layer = bool(self.adapter) and self.gradient_checkpointing
        return self.compute_bytes * (self.shape.count.largest_layer if one_layer else self.shape.count.layers)


@dataclass(frozen=True)
class WriterMemory:
    """Bytes of what writes the rollouts on this device."""

    weights: float = 0.0
    """A rollout engine's own copy of the student."""
    working: float = 0.0
    cache: float = 0.0
    """Keys and values of the rollouts under way."""
    stays: bool = False
    """It keeps all of this through the update."""

    @property
    def parts(self) -> dict[str, float]:
        return {"engine's weights": self.weights, "engine's working": self.working, "cache": self.cache}

    @property
    def total(self) -> float:
        return self.weights + self.working + self.cache


NO_WRITER = WriterMemory()


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step on one device, by what they hold."""

    weights: float
    adam: float
    gradients: float
    teachers: float
    reference: float
    autocast_copies: float
    activations: float
    """Of one micro-batch."""
    head: float
    """Logits that exist at one time, and the gradient of the output matrix."""
    gathered_layers: float
    """On verl: what FSDP makes whole for the moment (two layers, embedding and output matrix), with its gradients."""
    writer: WriterMemory
    offloaded: bool
    """The training state leaves the device while rollouts are written."""

    @property
    def update_parts(self) -> dict[str, float]:
        """By name, those of 0 bytes, too."""
        names = [field.name for field in fields(self) if field.name not in ("writer", "offloaded")]
        return {name.replace("_", " "): getattr(self, name) for name in names}

    @property
    def parts(self) -> dict[str, float]:
        return self.update_parts | self.writer.parts

    @property
    def state(self) -> float:
        """What outlives a stage: weights, Adam's moments, and the models that score."""
        return self.weights + self.adam + self.teachers + self.reference

    @property
    def update(self) -> float:
        """While the update runs."""
        return sum(self.update_parts.values()) + (self.writer.total if self.writer.stays else 0.0)

    @property
    def rollouts(self) -> float:
        """While the rollouts are written."""
        return (0.0 if self.offloaded else self.state) + self.writer.total

    @property
    def total(self) -> float:
        """The larger of the two, which come one after the other."""
        return max(self.update, self.rollouts)

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint: the trained weights, as large as their gradients, and Adam's moments."""
        return self.gradients + self.adam


def device_memory(
    student: TrainedModel,
    micro_batch_tokens: int,
    *,
    teachers: tuple[Stored, ...] = (),
    reference: Stored | None = None,
    shards: int = 1,
    on_gpu: bool = True,
    on_verl: bool = False,
    writer: WriterMemory = NO_WRITER,
    offloaded: bool = False,
) -> StepMemory:
    """What one device holds and computes in a step, with so many tokens of the update on it.

    Weights, gradients and moments are spread over `shards` devices. Locally the head is fused and autocast computes; verl has
    FSDP and a whole matrix of logits.
    """
    count, compute_bytes = student.shape.count, student.compute_bytes
    logits = 2 * micro_batch_tokens * student.shape.vocabulary  # two copies; of a fused head, two float32 buffers for a chunk
    fused = 4 * min(logits, CHUNK_ELEMENTS_GPU if on_gpu else CHUNK_ELEMENTS_CPU)
    return StepMemory(
        weights=student.weights / shards,
        adam=2 * student.gradients / shards,
        gradients=student.gradients / shards,
        teachers=sum(teacher.weights for teacher in teachers),
        reference=0.0 if reference is None else reference.weights,
        autocast_copies=0.0 if on_verl else student.autocast_copies,
        activations=micro_batch_tokens * student.shape.activation_elements(student.gradient_checkpointing) * compute_bytes,
        head=(logits * compute_bytes if on_verl else fused) + (0 if student.adapter else 4 * count.head),  # summed in float32
        gathered_layers=2 * compute_bytes * (count.outside + 2 * count.largest_layer) if on_verl else 0.0,
        writer=writer,
        offloaded=offloaded,
    )

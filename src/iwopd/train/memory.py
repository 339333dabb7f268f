"""How much memory a training step needs: arithmetic from the models' configs, without their weights.

An estimate, never compared with a GPU (there was none). What it leaves out: the allocator's slack, the CUDA context (about
0.5 GB), communication buffers of sharded training, and the working memory of kernels. Add 10-20 %.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from iwopd.algo.head import CHUNK_ELEMENTS_GPU

GB = 1e9


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step on one device, by what they hold."""

    weights: float
    gradients: float
    adam: float
    """Two moments."""
    teacher: float
    reference: float
    activations: float
    """Of one micro-batch."""
    head: float
    """The fused head's buffers: logits exist for one chunk of tokens at a time."""
    kv_cache: float
    gathered: float = 0.0
    """Sharded training: what is whole for the moment (two layers, embedding and output matrix), with its gradients."""
    engine: float = 0.0
    """The rollout engine's own copy of the weights, where it is not the trainer's."""

    @property
    def resident(self) -> float:
        """What is always there."""
        return self.weights + self.adam + self.teacher + self.reference

    @property
    def update(self) -> float:
        """While the update runs."""
        return self.resident + self.gradients + self.activations + self.head + self.gathered

    @property
    def rollouts(self) -> float:
        """While the rollouts are written."""
        return self.resident + self.kv_cache + self.engine

    @property
    def total(self) -> float:
        """Gradients, activations and head belong to the update, the cache to the rollouts: the larger of the two counts."""
        return max(self.update, self.rollouts)

    def __str__(self) -> str:
        shown = ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(self, field.name) / GB:.1f}"
            for field in fields(self)
            if getattr(self, field.name) >= 0.05 * GB
        )
        return f"{self.total / GB:.1f} GB ({shown})"


def step_memory(
    student: Any,
    teacher: Any | None = None,
    *,
    micro_batch_tokens: int,
    cached_tokens: int,
    weight_bytes: float = 4,
    compute_bytes: int = 2,
    teacher_bytes: float = 2,
    trained: float | None = None,
    reference_bytes: float = 0,
    gradient_checkpointing: bool = True,
    shards: int = 1,
    teacher_shards: int | None = None,
    gathers: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS_GPU,
    logits_bytes: float = 0,
    engine_bytes: float = 0,
    engine_shards: int = 1,
    counted: ParameterCount | None = None,
) -> StepMemory:
    """The memory of a step on one device.

    Args:
        student: transformers config.
        teacher: transformers config; None: it lives elsewhere (behind a server).
        micro_batch_tokens: tokens of one micro-batch of the update on this device.
        cached_tokens: rows under way x their tokens, in the sampler on this device.
        weight_bytes: of a student's parameter; 4: float32, 0.55: 4 bits with their scales.
        compute_bytes: of activations and cache; 2: bfloat16.
        teacher_bytes: of a teacher's parameter.
        trained: parameters that are trained (float32, with gradient and moments); None: all.
        reference_bytes: of a reference's parameter, where the method needs one and it is a copy; 0: none.
        gradient_checkpointing: recompute a layer's activations in the backward pass.
        shards: devices over which weights, gradients and moments are spread (FSDP).
        teacher_shards: devices over which the teacher is spread; None: as the student.
        gathers: count what FSDP makes whole for the moment, too.
        chunk_elements: of the fused head's buffers.
        logits_bytes: of each number in a whole [tokens, vocabulary] matrix of logits, all its copies together, for a trainer
            that makes one; 0: the fused head's chunks.
        engine_bytes: of a parameter in the rollout engine's own copy; 0: it has none.
        engine_shards: devices over which one copy of the engine is spread.
        counted: the student's parameters, where they have been counted already.
    """
    counted = counted or count_parameters(student)
    size = counted.total
    updated = size if trained is None else trained
    adapter = 0.0 if trained is None else 4 * trained
    return StepMemory(
        weights=(size * weight_bytes + adapter) / shards,
        gradients=4 * updated / shards,
        adam=8 * updated / shards,
        teacher=0.0 if teacher is None else parameter_count(teacher) * teacher_bytes / (teacher_shards or shards),
        reference=size * reference_bytes / shards,
        activations=micro_batch_tokens * activation_elements(student, gradient_checkpointing) * compute_bytes,
        head=(micro_batch_tokens * _vocabulary(student) * logits_bytes if logits_bytes else 4 * chunk_elements)
        + (4 * counted.head if trained is None else 0),
        kv_cache=cached_tokens * cache_elements(student) * compute_bytes,
        gathered=2 * compute_bytes * (counted.outside + 2 * counted.largest_layer) if gathers else 0.0,
        engine=size * engine_bytes / engine_shards,
    )


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a causal LM by what is done with them."""

    total: int
    """Tied matrices once."""
    outside: int
    """Embedding and output matrix (once where they are tied), positions, last norm."""
    layers: int
    """Matrices of the layers that multiply tokens, all experts."""
    active: float
    """The same for one token: of the experts only those that it is sent to."""
    experts: int
    """Those of `layers` that belong to experts."""
    head: int
    """The output matrix."""
    largest_layer: int


def parameter_count(config: Any) -> int:
    """Parameters of a causal LM; tied matrices once."""
    return count_parameters(config).total


def count_parameters(config: Any) -> ParameterCount:
    """Parameters of a causal LM, counted on a model without memory."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    text = config.get_text_config()
    experts = int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0)
    share = int(getattr(text, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
    by_layer: dict[str, int] = {}
    outside = matrices = routed = 0
    for name, parameter in model.named_parameters():
        size = int(parameter.numel())
        layer = _layer(name)
        if layer is None:
            outside += size
            continue
        by_layer[layer] = by_layer.get(layer, 0) + size
        if parameter.dim() > 1:
            matrices += size
            routed += size if ".experts." in name else 0
    head = int(model.get_output_embeddings().weight.numel())
    total = outside + sum(by_layer.values())
    active = matrices - routed + share * routed
    return ParameterCount(total, outside, matrices, active, routed, head, max(by_layer.values(), default=0))


def activation_elements(config: Any, gradient_checkpointing: bool) -> int:
    """Numbers kept of each token for the backward pass.

    A layer keeps its input and residuals, both norms (with float32 copies, which count twice), queries, keys, values, the
    attention's output, and the inner vectors of a gated feed-forward; attention is computed without its [T, T] matrix. With
    checkpointing, a layer keeps its input, and only the one that is being recomputed all of this.
    """
    text = config.get_text_config()
    heads, key_heads, width = head_sizes(text)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "num_experts_per_tok", None):
        inner = text.num_experts_per_tok * text.moe_intermediate_size
    layer = int(8 * text.hidden_size + 4 * (heads + key_heads) * width + 4 * inner)
    layers = int(text.num_hidden_layers)
    return layers * int(text.hidden_size) + layer if gradient_checkpointing else layers * layer


def cache_elements(config: Any) -> int:
    """Numbers in the key/value cache of each token."""
    text = config.get_text_config()
    _, key_heads, width = head_sizes(text)
    return 2 * int(text.num_hidden_layers) * key_heads * width


def head_sizes(text: Any) -> tuple[int, int, int]:
    """Attention heads, key/value heads, and the width of one."""
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return heads, key_heads, int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def _layer(name: str) -> str | None:
    """Number of the layer that a parameter belongs to: the first number in its name."""
    return next((part for part in name.split(".") if part.isdigit()), None)


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)

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

    @property
    def total(self) -> float:
        """Gradients, activations and head belong to the update, the cache to the rollouts: the larger of the two counts."""
        resident = self.weights + self.adam + self.teacher + self.reference
        return resident + max(self.gradients + self.activations + self.head, self.kv_cache)

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
    """
    size = parameter_count(student)
    updated = size if trained is None else trained
    adapter = 0.0 if trained is None else 4 * trained
    return StepMemory(
        weights=(size * weight_bytes + adapter) / shards,
        gradients=4 * updated / shards,
        adam=8 * updated / shards,
        teacher=0.0 if teacher is None else parameter_count(teacher) * teacher_bytes / (teacher_shards or shards),
        reference=size * reference_bytes / shards,
        activations=micro_batch_tokens * activation_elements(student, gradient_checkpointing) * compute_bytes,
        head=4 * CHUNK_ELEMENTS_GPU + (4 * _vocabulary(student) * student.hidden_size if trained is None else 0),
        kv_cache=cached_tokens * cache_elements(student) * compute_bytes,
    )


def parameter_count(config: Any) -> int:
    """Parameters of a causal LM, counted on a model without memory; tied matrices once."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    return sum(int(parameter.numel()) for parameter in model.parameters())


def activation_elements(config: Any, gradient_checkpointing: bool) -> int:
    """Numbers kept of each token for the backward pass.

    A layer keeps its input and residuals, both norms (with float32 copies, which count twice), queries, keys, values, the
    attention's output, and the inner vectors of a gated feed-forward; attention is computed without its [T, T] matrix. With
    checkpointing, a layer keeps its input, and only the one that is being recomputed all of this.
    """
    text = config.get_text_config()
    heads, key_heads, width = _heads(text)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "num_experts_per_tok", None):
        inner = text.num_experts_per_tok * text.moe_intermediate_size
    layer = int(8 * text.hidden_size + 4 * (heads + key_heads) * width + 4 * inner)
    layers = int(text.num_hidden_layers)
    return layers * int(text.hidden_size) + layer if gradient_checkpointing else layers * layer


def cache_elements(config: Any) -> int:
    """Numbers in the key/value cache of each token."""
    text = config.get_text_config()
    _, key_heads, width = _heads(text)
    return 2 * int(text.num_hidden_layers) * key_heads * width


def _heads(text: Any) -> tuple[int, int, int]:
    """Attention heads, key/value heads, and the width of one."""
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return heads, key_heads, int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)

"""The shape of a causal LM, from its config alone: parameters by use, numbers kept per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from iwopd.adapters import add_adapter
from iwopd.config import Lora


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a causal LM by what is done with them. Tied matrices count once."""

    total: int
    outside: int
    """Embedding and output matrix, positions, last norm."""
    layers: int
    """Matrices of the layers that multiply tokens, all experts."""
    active: float
    """The same for one token: of the experts only those that it is sent to."""
    experts: int
    """Those of `layers` that belong to experts."""
    head: int
    """The output matrix."""
    largest_layer: int


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A model without its weights."""

    config: Any
    """Of transformers."""
    count: ParameterCount
    name: str = ""
    origin: str = ""
    """Where the shape comes from, in words."""

    @classmethod
    def of(cls, config: Any, name: str = "", origin: str = "") -> ModelShape:
        return cls(config, _count(config), name, origin)

    @property
    def layers(self) -> int:
        return int(self._text.num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        return int(self._text.vocab_size)

    @property
    def attention_width(self) -> int:
        """Heads x width of one."""
        return self._heads[0] * self._heads[2]

    @property
    def cache_elements(self) -> int:
        """Numbers in the key/value cache of one token."""
        return 2 * self.layers * self._heads[1] * self._heads[2]

    @property
    def active(self) -> float:
        """Parameters that one token meets, embedding and output matrix included."""
        return self.count.total - self.count.layers + self.count.active

    @property
    def expert_share(self) -> float:
        """Share of the experts that one token is sent to; 1 without experts."""
        count = self.count
        return (count.active - (count.layers - count.experts)) / count.experts if count.experts else 1.0

    def activation_elements(self, gradient_checkpointing: bool) -> int:
        """Numbers kept of one token for the backward pass.

        A layer keeps its input and residuals, both norms (with float32 copies, which count twice), queries, keys, values, the
        attention's output, and the inner vectors of a gated feed-forward; attention is computed without its [T, T] matrix.
        With checkpointing, a layer keeps its input, and only the one that is being recomputed keeps all of this.
        """
        text, (heads, key_heads, width) = self._text, self._heads
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        if getattr(text, "num_experts_per_tok", None):
            inner = text.num_experts_per_tok * text.moe_intermediate_size
        layer = int(8 * text.hidden_size + 4 * (heads + key_heads) * width + 4 * inner)
        return self.layers * int(text.hidden_size) + layer if gradient_checkpointing else self.layers * layer

    def adapter_parameters(self, lora: Lora) -> int:
        """Parameters of a LoRA adapter on this model."""
        model = _empty_model(self.config)
        with torch.device("meta"):
            add_adapter(model, lora.rank, lora.alpha, lora.targets)
        return sum(int(parameter.numel()) for parameter in model.parameters() if parameter.requires_grad)

    @cached_property
    def _text(self) -> Any:
        return self.config.get_text_config()

    @cached_property
    def _heads(self) -> tuple[int, int, int]:
        """Attention heads, key/value heads, and the width of one."""
        text, heads = self._text, int(self._text.num_attention_heads)
        width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        return heads, int(getattr(text, "num_key_value_heads", None) or heads), width


def _empty_model(config: Any) -> Any:
    """The model without memory for its weights."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    return model


def _count(config: Any) -> ParameterCount:
    model = _empty_model(config)
    text = config.get_text_config()
    experts = int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0)
    share = int(getattr(text, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
    by_layer: Counter[str] = Counter()
    outside = matrices = routed = 0
    for name, parameter in model.named_parameters():
        size = int(parameter.numel())
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        if layer is None:
            outside += size
            continue
        by_layer[layer] += size
        if parameter.dim() > 1:
            matrices += size
            routed += size if ".experts." in name else 0
    return ParameterCount(
        total=outside + by_layer.total(),
        outside=outside,
        layers=matrices,
        active=matrices - routed + share * routed,
        experts=routed,
        head=int(model.get_output_embeddings().weight.numel()),
        largest_layer=max(by_layer.values(), default=0),
    )

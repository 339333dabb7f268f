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
    largest_tensor: int
    """Of those in a layer."""


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
    def hidden(self) -> int:
        return int(self._text.hidden_size)

    @property
    def heads(self) -> int:
        return self._heads[0]

    @property
    def key_heads(self) -> int:
        return self._heads[1]

    @property
    def head_width(self) -> int:
        return self._heads[2]

    @property
    def attention_width(self) -> int:
        """Heads x width of one."""
        return self._heads[0] * self._heads[2]

    @property
    def key_width(self) -> int:
        """Key/value heads x width of one."""
        return self._heads[1] * self._heads[2]

    @property
    def experts(self) -> int:
        """Of a layer; 0 where all of its numbers meet every token."""
        return _experts(self._text)

    @property
    def experts_per_token(self) -> int:
        return int(getattr(self._text, "num_experts_per_tok", None) or 0) if self.experts else 0

    @property
    def inner(self) -> int:
        """Inner size of the feed-forward part; with experts, of one of them."""
        text = self._text
        if self.experts:
            return int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
        return int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size)

    @property
    def cache_elements(self) -> int:
        """Numbers in the key/value cache of one token."""
        return 2 * self.layers * self.key_width

    @property
    def active(self) -> float:
        """Parameters that one token meets, embedding and output matrix included."""
        return self.count.total - self.count.layers + self.count.active

    @property
    def expert_share(self) -> float:
        """Share of the experts that one token is sent to; 1 without experts."""
        count = self.count
        return (count.active - (count.layers - count.experts)) / count.experts if count.experts else 1.0

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
    experts = _experts(text)
    share = int(getattr(text, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
    by_layer: Counter[str] = Counter()
    outside = matrices = routed = largest = 0
    for name, parameter in model.named_parameters():
        size = int(parameter.numel())
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        if layer is None:
            outside += size
            continue
        by_layer[layer] += size
        largest = max(largest, size)
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
        largest_tensor=largest,
    )


def _experts(text: Any) -> int:
    return int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0)

"""The lean path: the layers of a Qwen3, Qwen2 or Llama model as plain functions of its weights, without gradients.

Small models on a CPU spend much of their time around the arithmetic: module calls, masks, norms of a dozen operations. Here a
whole layer is a dozen operations. `rollout.lean_decoder` samples with it, and `lm` scores with it. The weights are read at
construction: it is stale after an update.

Shape letters: N tokens, H hidden size, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from iwopd.packing import packed_attention
from iwopd.rope import follows_batch

MODELS = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
COPY_BYTES = 2**28
"""For products with few rows, weights are copied into one transposed matrix per projection, which halves their time on a CPU,
up to this many bytes per model. Larger weights are used in place: they gain nothing, and the copies would not fit."""
BLOCKS = 4
"""Column blocks per matrix with 2 to 4 CPU threads: a single product with few rows hardly gains from a second thread, a
batch of products does (a quarter to a third less time at 2 to 64 rows; LOG.md)."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (layer index, queries [N, Q, D], keys [N, K, D], values [N, K, D]) -> [N, Q * D]."""


def lean_obstacle(model: nn.Module) -> str | None:
    """Why this model cannot take the lean path, or None if it can."""
    kind = type(model)
    if kind.__name__ not in MODELS or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is not one of {', '.join(MODELS)}"
    config: Any = model.config
    if getattr(config, "quantization_config", None) is not None:
        return "the weights are quantised"
    if any(layer != "full_attention" for layer in getattr(config, "layer_types", None) or ()):
        return "some layers have a sliding window"
    whole: Any = model
    if follows_batch(rope_type := whole.model.rotary_emb.rope_type):
        return f"rotary embeddings of type {rope_type!r}, whose frequencies follow the batch"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r}"
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "global forward hooks are set"
    plain = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
    adapters = tuple(f"{name}." for name, module in model.named_modules() if _is_lora(module))
    if adapters and _matrix_bytes(model) > COPY_BYTES:
        return "an adapter in a model whose weights are too large to be copied"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"module {name or 'model'!r} has a hook or a replaced forward"
        if name.startswith(adapters) or f"{name}." in adapters:
            continue  # merged into one matrix
        if type(module) not in plain and not type(module).__module__.startswith("transformers."):
            return f"module {name!r} is a {type(module).__name__}"
    parameters = list(model.parameters())
    if any(type(parameter.data) is not Tensor for parameter in parameters):
        return "parameters are not plain tensors"
    if len({(parameter.dtype, parameter.device) for parameter in parameters}) > 1:
        return "parameters have several dtypes or devices"
    if not parameters[0].dtype.is_floating_point or parameters[0].device.type == "meta":
        return f"parameters are {parameters[0].dtype} on {parameters[0].device}"
    return None


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has LoRA adapters that reading its weights merges."""
    return any(_is_lora(module) for module in model.modules())


def _is_lora(module: nn.Module) -> bool:
    """Whether it is a linear layer of peft's with one plain, enabled LoRA adapter: `weight + scale * B @ A`."""
    layer: Any = module
    if type(module).__name__ != "Linear" or type(module).__module__ != "peft.tuners.lora.layer":
        return False
    if layer.merged or layer.disable_adapters or len(layer.active_adapters) != 1 or layer.lora_variant:
        return False
    second = layer.lora_B[layer.active_adapters[0]]
    return type(layer.base_layer) is nn.Linear and not layer.fan_in_fan_out and second.bias is None


def _matrix_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 2)


def _weight(linear: nn.Module) -> Tensor:
    """[out, in], with the adapter merged."""
    layer: Any = linear
    weight: Tensor = layer.weight.detach()
    return weight + layer.get_delta_weight(layer.active_adapters[0]).detach() if _is_lora(linear) else weight


@dataclass(frozen=True)
class _Projection:
    """`x [N, in] -> [N, out]` through one or several concatenated matrices: [in, out], or [blocks, in, out / blocks]."""

    matrices: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    """Output size of each of the linear layers that it combines."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None and self.matrices[0].itemsize == 2:
            return residual + self(x)  # rounded in between, as the model itself does
        outputs = self._outputs(x, residual)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        outputs = self._outputs(x, None)
        return outputs if len(outputs) == len(self.sizes) else outputs[0].split(self.sizes, -1)

    def _outputs(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        outputs = []
        x = x.to(self.matrices[0].dtype)
        for matrix, bias in zip(self.matrices, self.biases, strict=True):
            addend = residual if bias is None else bias if residual is None else residual + bias
            outputs.append(_product(x, matrix, addend))
        return outputs


def _product(x: Tensor, matrix: Tensor, addend: Tensor | None) -> Tensor:
    if matrix.dim() == 2:
        return torch.mm(x, matrix) if addend is None else torch.addmm(addend, x, matrix)
    product = torch.bmm(x.expand(len(matrix), *x.shape), matrix).transpose(0, 1)  # [N, blocks, out / blocks]
    if addend is not None:
        product = addend.unflatten(-1, product.shape[1:]) + product
    return product.flatten(1)


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Projection
    qk_norm: Tensor | None
    """[Q + K, D] if queries and keys are normalised."""
    output: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection


class LeanModel:
    """The weights of a model that has no `lean_obstacle`."""

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int | None = None,
        *,
        width: int,
        few_rows: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Read the weights.

        width: number of positions. few_rows: lay out the matrices for one token per sequence.
        dtype: multiply and attend in this half precision, as autocast does; what layers add up and the head stay as they are.
        """
        whole: Any = model
        body = whole.model
        attention = body.layers[0].self_attn
        self.heads: int = attention.q_proj.weight.shape[0] // attention.head_dim
        self.kv_heads: int = attention.k_proj.weight.shape[0] // attention.head_dim
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = whole.config.rms_norm_eps
        self.eps_tensor = torch.tensor(self.eps)
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        self.norm: Tensor = body.norm.weight.detach()
        self.dtype: torch.dtype = dtype or self.embedding.dtype
        """Of matrix products, queries, keys and values."""
        copies = few_rows and _matrix_bytes(model) <= COPY_BYTES
        plain = self.dtype == torch.float32 and self.embedding.device.type == "cpu"
        blocks = BLOCKS if few_rows and plain and 1 < torch.get_num_threads() <= BLOCKS else 1
        read = _Reader(self.dtype, copies, blocks)
        self.layers = [read.layer(layer, self.heads, self.kv_heads) for layer in body.layers]
        self.head = _Reader(self.embedding.dtype, copies, blocks).projection([whole.lm_head], vocab_size)
        cos, sin = body.rotary_emb(self.embedding[:1], torch.arange(width, device=self.embedding.device)[None])
        sign = torch.ones_like(sin)
        sign[..., : self.head_dim // 2] = -1
        self.cos: Tensor = cos[0]  # [width, D]
        self.sin: Tensor = (sin * sign)[0]

    def states(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Last hidden states [N, H] of tokens [N], normalised; only those of tokens `keep` if given."""
        hidden = self.embedding[ids]
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        both = self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):
            x = self._norm(hidden, layer.attention_norm)
            qkv = layer.qkv(x).view(len(ids), both + self.kv_heads, self.head_dim)
            qk, value = qkv[:, :both], qkv[:, both:]
            if layer.qk_norm is not None:
                qk = self._norm(qk, layer.qk_norm)
            turned = qk.roll(self.head_dim // 2, -1)
            qk = torch.addcmul(qk * cos, turned, sin) if self.dtype.itemsize > 2 else (qk * cos + turned * sin).to(self.dtype)
            mixed = attend(index, qk[:, : self.heads], qk[:, self.heads :], value)
            if keep is not None and index == len(self.layers) - 1:  # no attention follows, so the others are not needed
                mixed, hidden = mixed[keep], hidden[keep]
            hidden = layer.output(mixed, hidden)
            gate, up = layer.gate_up.parts(self._norm(hidden, layer.mlp_norm))
            hidden = layer.down(F.silu(gate).mul_(up), hidden)
        return self._norm(hidden, self.norm)

    def sequence_states(self, ids: Tensor, lengths: Sequence[int], keep: Tensor) -> Tensor:
        """As `states` for packed whole sequences, each with positions from 0."""

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return packed_attention(query, key, value, lengths, self.scale).flatten(1)

        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        return self.states(ids, positions, attend, keep)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm of the last dimension."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * weight
        # torch's rms_norm is a dozen operations on a CPU.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps_tensor, norm, norm, value=1 / x.shape[-1]).rsqrt_().mul(x).mul_(weight)


@dataclass(frozen=True)
class _Reader:
    """How weights are laid out."""

    dtype: torch.dtype
    """Of the matrices."""
    copies: bool
    """Whether each projection is one contiguous copy."""
    blocks: int

    def layer(self, layer: Any, heads: int, kv_heads: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            qk_norm = torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1)))
        return _Layer(
            attention_norm=layer.input_layernorm.weight.detach(),
            qkv=self.projection([attention.q_proj, attention.k_proj, attention.v_proj]),
            qk_norm=qk_norm,
            output=self.projection([attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self.projection([mlp.gate_proj, mlp.up_proj]),
            down=self.projection([mlp.down_proj]),
        )

    def projection(self, linears: list[nn.Linear], rows: int | None = None) -> _Projection:
        """The weights of these layers: one contiguous copy, or views. `rows` drops the rows of ids that do not exist."""
        weights = [_weight(linear)[:rows].to(self.dtype) for linear in linears]
        biases = [None if linear.bias is None else linear.bias.detach()[:rows].to(self.dtype) for linear in linears]
        sizes = tuple(len(weight) for weight in weights)
        if not self.copies:
            return _Projection(tuple(_columns(weight, self.blocks) for weight in weights), tuple(biases), sizes)
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        return _Projection((_columns(torch.cat(weights), self.blocks).contiguous(),), (bias,), sizes)


def _columns(weight: Tensor, blocks: int) -> Tensor:
    """A view of `weight` [out, in] for `_Projection`, split into blocks if `out` is divisible by them."""
    if blocks > 1 and len(weight) % blocks == 0:
        return weight.view(blocks, -1, weight.shape[1]).transpose(1, 2)
    return weight.t()

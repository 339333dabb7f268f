"""The lean decoder: one functional step over the weights of a Qwen3, Qwen2 or Llama model.

For models of a size that a CPU can train, most of the time of a step goes into the machinery around the arithmetic: module
calls, masks built anew, a cache copied at every token. Here a step is a dozen tensor operations a layer on a cache that is
allocated once. The weights are read when the decoder is built, so build one for every call: nothing outlives an update.

Shape letters as in `decoding`; also H hidden size, Q query heads, K key/value heads, D head size, L layers, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

MODELS = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings that depend on the position alone (others also depend on the length of the batch)."""
COPY_BYTES = 2**28
"""Weights are copied into one transposed matrix a projection, which halves the time of small products on a CPU, up to this
many bytes a model. Beyond it they are used in place: large products gain nothing, and the copies would not fit."""
BLOCKS = 4
"""Into how many blocks of columns a matrix is cut for 2 to 4 CPU threads: a product with few rows hardly gains from a second
thread, a batch of products shares itself out (a quarter to a third less time at 2 to 64 rows; LOG.md)."""
FIRST_COLUMNS = 128
"""Columns of cache beyond the prompt that are allocated at first; grows by half."""


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
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        return f"rotary embeddings of type {rope_type!r}"
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
            continue  # read as one matrix
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


def _is_lora(module: nn.Module) -> bool:
    """Whether it is a linear layer with one plain LoRA adapter of peft's that is switched on: `weight + scale * B @ A`."""
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
    """[out, in], an adapter added."""
    layer: Any = linear
    weight: Tensor = layer.weight.detach()
    return weight + layer.get_delta_weight(layer.active_adapters[0]).detach() if _is_lora(linear) else weight


@dataclass(frozen=True)
class _Projection:
    """`x [N, in] -> [N, out]` through one or several matrices side by side: [in, out], or [blocks, in, out / blocks]."""

    matrices: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        outputs = []
        for matrix, bias in zip(self.matrices, self.biases, strict=True):
            addend = residual if bias is None else bias if residual is None else residual + bias
            outputs.append(_product(x, matrix, addend))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


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
    """[Q + K, D], where queries and keys are normalised."""
    output: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection


class LeanDecoder:
    """See the module's docstring; `lean_obstacle(model)` must be None."""

    joins: bool = True

    def __init__(self, model: nn.Module, vocab_size: int | None = None, *, rows: int, width: int) -> None:
        """Room for `rows` rows of at most `width` tokens, prompt included."""
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
        copies = _matrix_bytes(model) <= COPY_BYTES
        self.layers = [_read_layer(layer, self.heads, self.kv_heads, copies) for layer in body.layers]
        self.head = _read_projection([whole.lm_head], copies, vocab_size)
        cos, sin = body.rotary_emb(self.embedding[:1], torch.arange(width, device=self.embedding.device)[None])
        sign = torch.ones_like(sin)
        sign[..., : self.head_dim // 2] = -1
        self.cos: Tensor = cos[0]  # [width, D]
        self.sin: Tensor = (sin * sign)[0]
        self.rows = rows
        # Rows that joined late end further right: a quarter more room means that moving them all left is seldom needed.
        self.most_columns = width + width // 4 + 16
        self.keys = self.embedding.new_empty(0)  # [L, rows, K, C, D]
        self.values = self.keys
        self.bias = self.embedding.new_empty(0, 0)  # [rows, C] 0 on real tokens, -inf on padding
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.count = 0
        self.columns = 0
        self.starts = torch.empty(0, dtype=torch.long)  # [n] first column of each row, on the CPU
        self.positions = torch.empty(0, dtype=torch.long, device=self.embedding.device)  # [n] of the next token
        self._note_starts()

    def admit(self, ids: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        """Read prompts and append rows; see `decoding.Decoder`."""
        (prompts, length), newcomers = ids.shape, len(source)
        if self.count + newcomers > self.rows:
            raise ValueError(f"no room for {newcomers} more rows beside {self.count}: the decoder was built for {self.rows}")
        if self.count == 0:
            self.columns = length
        elif length > self.columns:
            raise ValueError(f"a prompt of {length} tokens cannot join rows of {self.columns}; admit long prompts first")
        self._reserve(self.columns)
        rows, columns = slice(self.count, self.count + newcomers), slice(self.columns - length, self.columns)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        seen = mask[:, None, None, :] & torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # Padding looks at itself: a row that sees nothing would be NaN, and NaN times a weight of 0 is still NaN.
        seen = seen | torch.eye(length, dtype=torch.bool, device=ids.device)

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (x.unflatten(0, (prompts, length)).transpose(1, 2) for x in (query, key, value))
            self.keys[index, rows, :, columns] = key[source]
            self.values[index, rows, :, columns] = value[source]
            gqa = self.heads != self.kv_heads
            output = F.scaled_dot_product_attention(query, key, value, seen, scale=self.scale, enable_gqa=gqa)
            return output.transpose(1, 2).reshape(prompts * length, -1)

        hidden = self._layers(ids.flatten(), positions.flatten(), attend)
        self.count += newcomers
        starts = self.columns - mask.sum(1)
        self.starts = torch.cat((self.starts, starts[source].cpu()))
        self.positions = torch.cat((self.positions, (positions[:, -1] + 1)[source]))
        self._note_starts()
        return self._logits(hidden.view(prompts, length, -1)[:, -1])[source]

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row; see `decoding.Decoder`."""
        self._reserve(self.columns + 1)
        count, last = self.count, self.columns
        used = slice(self.first, last + 1)
        bias = self.bias[:count, None, None, used] if self.padded else None
        # Views of all layers at once: made in every layer, they would take a tenth of a small model's step.
        keys, values = self.keys[:, :count, :, used].unbind(), self.values[:, :count, :, used].unbind()
        new_key, new_value = self.keys[:, :count, :, last].unbind(), self.values[:, :count, :, last].unbind()

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            new_key[index].copy_(key)
            new_value[index].copy_(value)
            # The query heads that share a key head stand side by side: as if they were queries of that head.
            grouped = query.view(count, self.kv_heads, -1, self.head_dim)
            output = F.scaled_dot_product_attention(grouped, keys[index], values[index], bias, scale=self.scale)
            return output.reshape(count, -1)

        hidden = self._layers(ids, self.positions, attend)
        self.columns += 1
        self.positions = self.positions + 1
        return self._logits(hidden)

    def select(self, order: Tensor) -> None:
        """Keep these rows; see `decoding.Decoder`."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(1)
        if len(moved):
            origin = order[moved]
            for cache in (self.keys, self.values):
                cache[:, moved] = cache[:, origin]
        self.count = len(order)
        self.starts = self.starts[order.cpu()]
        self.positions = self.positions[order]
        self._note_starts()

    def _layers(self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Hidden states [N, H] of tokens [N] after the last layer; `attend` stores keys and values and mixes them."""
        hidden = self.embedding[ids]
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        both = self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):
            x = self._norm(hidden, layer.attention_norm)
            qkv = layer.qkv(x).view(len(ids), both + self.kv_heads, self.head_dim)
            qk, value = qkv[:, :both], qkv[:, both:]
            if layer.qk_norm is not None:
                qk = self._norm(qk, layer.qk_norm)
            qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
            hidden = layer.output(attend(index, qk[:, : self.heads], qk[:, self.heads :], value), hidden)
            x = self._norm(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(x).chunk(2, -1)
            hidden = layer.down(F.silu(gate).mul_(up), hidden)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(self._norm(hidden, self.norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm of the last dimension."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * weight
        # torch's is a dozen operations on a CPU.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps_tensor, norm, norm, value=1 / x.shape[-1]).rsqrt_().mul(x).mul_(weight)

    def _note_starts(self) -> None:
        """Refresh what follows from `starts`: the first column in use, whether there is padding, and the bias that hides it."""
        self.first = int(self.starts.min()) if self.count else 0
        self.padded = bool(self.count) and int(self.starts.max()) > self.first
        if self.padded:
            columns = torch.arange(self.bias.shape[1], device=self.bias.device)
            hidden = columns < self.starts.to(self.bias.device)[:, None]
            self.bias[: self.count] = torch.zeros_like(self.bias[: self.count]).masked_fill_(hidden, float("-inf"))

    def _reserve(self, columns: int) -> None:
        """Make the cache hold `columns` columns: by moving the rows to its left end, or by allocating a larger one."""
        have = self.bias.shape[-1]
        if columns <= have:
            return
        if self.count and (self.first >= have // 4 or have >= self.most_columns):
            self._shift()
            return
        size = max(columns, min(have * 3 // 2 if have else columns + FIRST_COLUMNS, self.most_columns))
        shape = (len(self.layers), self.rows, self.kv_heads, size, self.head_dim)
        # Zeros, because what no row has written is multiplied by 0 and must be finite.
        keys, values = self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)
        if have:
            keys[:, :, :, :have], values[:, :, :, :have] = self.keys, self.values
        self.keys, self.values = keys, values
        self.bias = self.embedding.new_zeros(self.rows, size)
        self._note_starts()

    def _shift(self) -> None:
        for cache in (self.keys, self.values):
            used = cache[:, : self.count, :, self.first : self.columns].clone()
            cache[:, : self.count, :, : self.columns - self.first] = used
        self.columns -= self.first
        self.starts = self.starts - self.first
        self._note_starts()


def _read_layer(layer: Any, heads: int, kv_heads: int, copies: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        qk_norm = torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1)))
    return _Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=_read_projection([attention.q_proj, attention.k_proj, attention.v_proj], copies),
        qk_norm=qk_norm,
        output=_read_projection([attention.o_proj], copies),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_read_projection([mlp.gate_proj, mlp.up_proj], copies),
        down=_read_projection([mlp.down_proj], copies),
    )


def _read_projection(linears: list[nn.Linear], copies: bool, rows: int | None = None) -> _Projection:
    """The weights of these layers: one contiguous copy, or views. `rows` cuts ids that do not exist."""
    weights = [_weight(linear)[:rows] for linear in linears]
    biases = tuple(None if linear.bias is None else linear.bias.detach()[:rows] for linear in linears)
    if not copies:
        return _Projection(tuple(_columns(weight) for weight in weights), biases)
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
    return _Projection((_columns(torch.cat(weights)).contiguous(),), (bias,))


def _columns(weight: Tensor) -> Tensor:
    """A view of `weight` [out, in] that `_Projection` multiplies by: cut into blocks where that is faster."""
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and len(weight) % BLOCKS == 0
    if plain and 1 < torch.get_num_threads() <= BLOCKS:
        return weight.view(BLOCKS, -1, weight.shape[1]).transpose(1, 2)
    return weight.t()

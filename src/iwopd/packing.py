"""Several sequences packed into a single row, without padding; and how rows are dealt to micro-batches, packed or padded.

A packed row [1, N] needs positions that restart with every sequence, and an attention that respects the boundaries. They are
passed under transformers' names for FlashAttention's kernels (`cu_seq_lens_q`, ...). A model loaded with FlashAttention uses
them directly (never run; the tests have a stand-in). On a CPU the attention is `attend` below: scaled dot-product attention
for each sequence.

Not every model can be packed (sliding windows, recurrent layers): `enable_packing` refuses known cases and tests the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from iwopd.devices import upload
from iwopd.modes import eval_mode

ATTENTION = "iwopd_packed"
"""The name of `attend` among transformers' attention functions."""
TOLERANCE = 1e-4
"""Largest relative difference of packed hidden states. Rounding is a hundredth of it, a leak between sequences 1,000 times."""
TOLERANCE_HALF = 5e-2
VARLEN = {"flash_attention_2", "flash_attention_3"}
"""Attentions of transformers that take the boundaries of sequences, on any device."""


class PackingError(RuntimeError):
    """An attention layer needs something that packing does not support."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries [1, heads, N, D] within each sequence; returns [1, N, heads, D] and no attention weights."""
    boundaries: Tensor | None = options.pop("cu_seq_lens_q", None)
    if boundaries is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise PackingError(f"its attention has {name!r}")
    if query.shape[2] != key.shape[2] or not getattr(module, "is_causal", True):
        raise PackingError("its attention is not causal self-attention")
    runs = _runs(boundaries.diff().tolist())
    # Split, not sliced: the backward pass of a split is one copy, that of each slice a full-size tensor of zeros.
    pieces = zip(*(x[0].split([length * count for length, count in runs], 1) for x in (query, key, value)), strict=True)
    outputs = []
    for (length, count), piece in zip(runs, pieces, strict=True):
        # Neighbours of the same length are one batch: [heads, count * length, D] viewed as [count, heads, length, D].
        q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in piece)
        output, _ = sdpa_attention_forward(module, q, k, v, None, **options)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None], None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention of queries [N, Q, D] to keys and values [N, K, D] within sequences of these lengths: [N, Q, D]."""
    runs = _runs(lengths)
    pieces = zip(*(x.split([length * count for length, count in runs]) for x in (query, key, value)), strict=True)
    outputs = []
    for (length, count), piece in zip(runs, pieces, strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in piece)
        gqa = q.shape[1] != k.shape[1]
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbours of the same length, each one batch: (length, count)."""
    return [(length, len(list(run))) for length, run in itertools.groupby(lengths)]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_inputs(model: Any, input_ids: Tensor, lengths: Tensor) -> dict[str, Any]:
    """The arguments of a forward pass over sequences of these `lengths` [B], one after the other in `input_ids` [M].

    `lengths` are on the CPU, so that nobody waits for them.
    """
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    boundaries = upload(nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), input_ids.device)
    longest = int(lengths.max())
    # transformers uses a four-dimensional mask as it is; without one it would make one of [N, N].
    done = input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool) if _attention(model) == ATTENTION else None
    return {
        "input_ids": input_ids[None],
        "position_ids": upload(torch.arange(len(input_ids)) - first, input_ids.device)[None],
        "attention_mask": done,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


def enable_packing(model: Any, vocab_size: int | None = None) -> str | None:
    """Prepare a causal LM for packed rows. If it cannot be packed, return why and leave it unchanged."""
    obstacle = _known_obstacle(model)
    if obstacle is not None:
        return obstacle
    before = _attention(model)
    if before == "sdpa":
        model.set_attn_implementation(ATTENTION)
    try:
        obstacle = _tried_out(model, vocab_size)
    except Exception as error:  # any error of the trial means that the model cannot be packed
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle is not None and before == "sdpa":
        model.set_attn_implementation(before)
    return obstacle


def _attention(model: Any) -> str | None:
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name


def _known_obstacle(model: Any) -> str | None:
    """Obstacles that a trial with short sequences would not reveal."""
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not let its attention be chosen"
    obstacle = attention_obstacle(_attention(model), next(model.parameters()).device.type)
    if obstacle is not None:
        return obstacle
    config = model.config.get_text_config()
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers do not have full attention"
    if getattr(config, "sliding_window", None) is not None or getattr(config, "attention_chunk_size", None) is not None:
        return "its attention has a window"
    return None


def attention_obstacle(attention: str | None, device_type: str) -> str | None:
    """Why an attention implementation, by transformers' name, cannot keep packed sequences apart on this kind of device."""
    if attention in VARLEN:
        return None
    if attention not in ("sdpa", ATTENTION):
        return f"its attention is {attention!r}"
    if device_type != "cpu":
        return f"with {attention!r} sequences are packed on a CPU only; load the model with flash_attention_2"
    return None


@torch.no_grad()
def _tried_out(model: Any, vocab_size: int | None) -> str | None:
    """Compare sequences of random ids, packed and one at a time, in the caller's context (autocast)."""
    device = next(model.parameters()).device
    lengths = torch.tensor([23, 9, 9, 1, 17])
    most = vocab_size or model.config.get_text_config().vocab_size
    ids = torch.randint(most, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0)).to(device)
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    half = half or torch.is_autocast_enabled(device.type)
    with eval_mode(model):
        inputs = packed_inputs(model, ids, lengths)
        packed = model.base_model(**inputs).last_hidden_state[0]
        rows = ids.split(lengths.tolist())
        single = torch.cat([model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    difference = float((packed - single).abs().max() / single.abs().max())
    if difference <= (TOLERANCE_HALF if half else TOLERANCE):
        return None
    return f"its hidden states differ by {difference:.2g} when sequences are packed"


def _longest_first(lengths: Sequence[int], budget: int) -> list[int]:
    if budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {budget}")
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def micro_batches(lengths: Sequence[int], budget: int, fill: float = 0.7) -> list[list[int]]:
    """Deal rows to micro-batches of at most `budget` padded tokens (or one row), longest first, of similar lengths.

    A row joins a micro-batch only if it is at least `fill` as long as its longest, which bounds the padding.
    """
    batches: list[list[int]] = []
    longest = 0
    for row in _longest_first(lengths, budget):
        current = batches[-1] if batches else []
        if current and (len(current) + 1) * longest <= budget and lengths[row] >= fill * longest:
            current.append(row)
        else:
            batches.append([row])
            longest = lengths[row]
    return batches


def packed_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Deal rows to micro-batches of at most `budget` tokens (or one row), longest first: like lengths are neighbours."""
    batches: list[list[int]] = []
    room = 0
    for row in _longest_first(lengths, budget):
        if not batches or lengths[row] > room:
            batches.append([])
            room = budget
        batches[-1].append(row)
        room -= lengths[row]
    return batches


def padding_waste(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the padded tokens that are padding."""
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1.0 - sum(lengths) / padded if padded else 0.0

"""A stand-in for FlashAttention's kernels: no GPU runs here, so they cannot.

It has their rule of dtypes (half precision only), their arguments (boundaries of sequences without padding) and their result,
computed by torch on the CPU. Everything around it is transformers' own code for `flash_attention_2`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Queries [B, T, heads, D], keys and values [B, S, fewer heads, D]; the last query sees the last key."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows, columns = q.shape[2], k.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows) if causal else None
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    return _attend(q, k, v, softmax_scale, causal)


def _flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    lengths = [boundaries.diff().tolist() for boundaries in (cu_seqlens_q, cu_seqlens_k)]
    assert (max(lengths[0]), max(lengths[1])) == (max_seqlen_q, max_seqlen_k)
    pieces = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    return torch.cat([_attend(one[None], two[None], three[None], softmax_scale, causal)[0] for one, two, three in pieces])


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers find the stand-in where it looks for the kernels."""
    found = (_flash, _flash_varlen, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *arguments, **options: found)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(flash, name, None)
    monkeypatch.setattr(flash, "_process_flash_kwargs_fn", None)


def with_flash(model: Any) -> Any:
    """A model as if it was loaded with `attn_implementation="flash_attention_2"`, which asks for a GPU."""
    model.config._attn_implementation_internal = "flash_attention_2"
    return model

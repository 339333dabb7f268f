"""The k likeliest next tokens: how many two models have in common, and how far apart the models are on them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo.head import OutputHead, Precision, row_chunks
from iwopd.algo.logprobs import LOGPROB_FLOOR


class TopKOverlap(NamedTuple):
    """Of each token, in [0, 1]."""

    shared: Tensor
    """`|top-k(student) & top-k(teacher)| / k`."""
    same_first: Tensor
    """1 where both find the same token likeliest, else 0."""


@torch.no_grad()
def top_k_overlap(logits: Tensor, teacher_logits: Tensor, k: int) -> TopKOverlap:
    """Top-k overlap [...] of logits [..., V]. Ties at the border are broken as `torch.topk` does."""
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"student logits have shape {list(logits.shape)}, the teacher's {list(teacher_logits.shape)}")
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k must lie in 1..{logits.shape[-1]}, the size of the vocabulary, got {k}")
    ours, theirs = logits.topk(k, -1).indices, teacher_logits.topk(k, -1).indices  # [..., k], likeliest first
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return TopKOverlap(shared_ids(ours, theirs, dtype), (ours[..., 0] == theirs[..., 0]).to(dtype))


def shared_ids(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`|ours & theirs| / k` [...] of two sets of k ids [..., k]."""
    return (ours[..., :, None] == theirs[..., None, :]).any(-1).to(dtype).mean(-1)


@torch.no_grad()
def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(student || teacher) [...] over k ids: of log-probs [..., k] of the same ids, both renormalised on them.

    0 for k = 1. A teacher's -inf counts as `LOGPROB_FLOOR`.
    """
    ours = logprobs.log_softmax(-1)
    theirs = teacher_logprobs.clamp(min=LOGPROB_FLOOR).log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


@torch.no_grad()
def token_top_k_overlap(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> TopKOverlap:
    """The same from hidden states [N, H] and output matrices, in chunks of rows: a [N, V] tensor never exists."""
    # The order of logits is the same at any temperature.
    head = OutputHead.build(hidden, weight, bias, 1.0, vocab_size, precision)
    teacher = OutputHead.build(teacher_hidden, teacher_weight, teacher_bias, 1.0, vocab_size, precision)
    teacher = replace(teacher, dtype=head.dtype)
    shared = torch.empty(len(hidden), dtype=head.dtype, device=hidden.device)
    same_first = torch.empty_like(shared)
    for chunk in row_chunks(head, hidden, spare=1):
        found = top_k_overlap(chunk.logits, teacher.logits(teacher_hidden[chunk.source], chunk.spare[0]), k)
        shared[chunk.rows], same_first[chunk.rows] = found
    return TopKOverlap(shared, same_first)

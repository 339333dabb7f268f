"""The k likeliest next tokens: how many two models have in common, and how far apart the models are on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo._checks import LOGPROB_FLOOR


class TopKOverlap(NamedTuple):
    """Of each token, in [0, 1]."""

    shared: Tensor
    """`|top-k(student) & top-k(teacher)| / k`."""
    same_first: Tensor
    """1 where both find the same token likeliest, else 0."""


def top_k_overlap(ours: Tensor, theirs: Tensor) -> TopKOverlap:
    """Of two models' k likeliest ids [..., k], likeliest first."""
    return TopKOverlap(shared_ids(ours, theirs), (ours[..., 0] == theirs[..., 0]).float())


def shared_ids(ours: Tensor, theirs: Tensor) -> Tensor:
    """`|ours & theirs| / k` [...] of two sets of k ids [..., k]."""
    return (ours[..., :, None] == theirs[..., None, :]).any(-1).float().mean(-1)


@torch.no_grad()
def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(student || teacher) [...] over k ids: of log-probs [..., k] of the same ids, both renormalised on them.

    0 for k = 1. A teacher's -inf counts as `LOGPROB_FLOOR`.
    """
    ours = logprobs.log_softmax(-1)
    theirs = teacher_logprobs.clamp(min=LOGPROB_FLOOR).log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)

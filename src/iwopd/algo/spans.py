"""Spans: what two tokenisations of one text have in common.

Two tokenizers cut the same bytes at different places. Between two neighbouring places where both cut lies a span: the smallest
piece of text that has a probability under both models. A span is one action: its log-prob is the sum over its tokens, its gap
`a[s] = lp_T(span) - lp_0(span)`, and the gaps of all spans sum up to the difference of both models' log-probs of the text.

Shape letters: S spans of the rollout that has most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch_mask, wide
from iwopd.algo.evidence import Evidence

UNSCORED = -1
"""Number of the span of a token that is in none: the teacher says nothing of it."""

_SUMMED = ("teacher_logprobs", "old_logprobs", "reference_logprobs", "rollout_logprobs", "student_entropy")
"""Evidence of a span is the sum over its tokens: of log-probs, and of entropies along the path (chain rule)."""
_SHARED = ("correct", "prompt", "reward_advantages")
"""Evidence that all tokens of a rollout share."""


def cut_spans(ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[int], list[int]]:
    """The span of every token of two tokenisations, whose byte lengths these are; both must sum up to the same text.

    A token without bytes belongs to the span that follows, at the end of the text to the last one.
    """
    ends = [list(accumulate(lengths)) for lengths in (ours, theirs)]
    totals = [found[-1] if found else 0 for found in ends]
    if totals[0] != totals[1]:
        raise ValueError(f"two tokenisations of one text must have the same bytes, got {totals[0]} and {totals[1]}")
    cuts = sorted(set(ends[0]) & set(ends[1]) - {0})

    def spans(lengths: Sequence[int], until: Sequence[int]) -> list[int]:
        starts = (end - length for end, length in zip(until, lengths, strict=True))
        return [min(bisect_right(cuts, start), max(0, len(cuts) - 1)) for start in starts]

    return spans(ours, ends[0]), spans(theirs, ends[1])


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of a batch of rollouts: which tokens belong to which."""

    index: Tensor
    """[B, T] int64 number of each token's span; S for tokens that are in none, or in one that is not whole."""
    mask: Tensor
    """[B, S] boolean: the spans of which all tokens are valid."""

    @classmethod
    def of(cls, spans: Tensor, mask: Tensor) -> Spans:
        """`spans` [B, T] as `Evidence.spans` has them. A span with a token outside the mask does not count."""
        check_batch_mask(mask)
        if spans.shape != mask.shape or spans.dtype != torch.long:
            raise ValueError(f"spans must be int64 {list(mask.shape)}, got {spans.dtype} {list(spans.shape)}")
        count = int(spans.max()) + 1 if spans.numel() else 0
        slot = torch.where(spans < 0, count, spans)
        shape = (len(spans), count + 1)
        tokens = torch.zeros(shape, dtype=torch.long, device=spans.device).scatter_add_(1, slot, torch.ones_like(slot))
        valid = torch.zeros_like(tokens).scatter_add_(1, slot, mask.long())
        whole = (tokens > 0) & (tokens == valid)
        whole[:, count] = False
        return cls(torch.where(whole.gather(1, slot), slot, count), whole[:, :count])

    @property
    def tokens(self) -> Tensor:
        """[B, T] boolean: the tokens of valid spans."""
        return self.index < self.mask.shape[1]

    def sum(self, values: Tensor) -> Tensor:
        """[B, S] of values [B, T]; what lies outside the spans may be anything."""
        kept = wide(torch.where(self.tokens, values, torch.zeros((), dtype=values.dtype, device=values.device)))
        total = kept.new_zeros((len(values), self.mask.shape[1] + 1)).scatter_add_(1, self.index, kept)
        return total[:, :-1].to(values.dtype)

    def shared(self, values: Tensor) -> Tensor:
        """[B, S] of values [B, T] that all tokens of a span have in common."""
        found = values.new_zeros((len(values), self.mask.shape[1] + 1)).scatter_(1, self.index, values)
        return torch.where(self.mask, found[:, :-1], torch.zeros((), dtype=values.dtype, device=values.device))

    def expand(self, values: Tensor) -> Tensor:
        """[B, T] of values [B, S]: every token has its span's; 0 (or false) outside."""
        nothing = values.new_zeros((len(values), 1))
        return torch.cat([values, nothing], 1).gather(1, self.index)

    def compress(self, evidence: Evidence) -> Evidence:
        """The same evidence with spans [B, S] in the place of tokens, as rules and advantages see it."""
        changed = dict.fromkeys(_SUMMED, self.sum) | dict.fromkeys(_SHARED, self.shared)
        kept = {"mask", "progress", "agreement", "spans"}
        found = {one.name: getattr(evidence, one.name) for one in fields(evidence)}
        for name, values in found.items():
            if values is not None and name not in changed and name not in kept:
                raise ValueError(f"{name} compares distributions over the ids of two tokenizers, which have none in common")
        summed: dict[str, Any] = {name: change(found[name]) for name, change in changed.items() if found[name] is not None}
        return replace(evidence, mask=self.mask, spans=None, **summed)

"""What a model can say of tokens beside their log-probs: entropy, likeliest ids, log-probs of given ids, hidden states.

Shape letters: N tokens, V vocabulary, H hidden size, K ids of one token, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from iwopd.algo._checks import Checks
from iwopd.algo.head import OutputHead, Precision, row_chunks

NO_ID = -1
"""Fills the places of a support that hold no id."""
REST_FLOOR = -23.0
"""Log-prob that a bucket for the rest has at least: 1e-10, below what float32 can tell from nothing."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model, beside the log-probs of the written tokens."""

    entropy: bool = False
    top_k: int = 0
    """So many of the likeliest ids, with their log-probs."""
    chosen: bool = False
    """Log-probs of ids that the asker hands over."""
    states: bool = False
    """Last hidden states: with the output matrix they are the whole distribution."""

    @property
    def names(self) -> frozenset[str]:
        """What a scorer must be able to give (`Scorer.gives`)."""
        found = {"entropy": self.entropy, "top-k": self.top_k > 0, "chosen": self.chosen, "states": self.states}
        return frozenset(name for name, asked in found.items() if asked)


NOTHING = Wanted()


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What a model says of N tokens at the sampling temperature, over the full vocabulary; None: was not asked for."""

    logprobs: Tensor
    """[N] of the written tokens; -inf where impossible."""
    entropy: Tensor | None = None
    """[N] in nats."""
    top_ids: Tensor | None = None
    """[N, K] int64, likeliest first."""
    top_logprobs: Tensor | None = None
    """[N, K]."""
    chosen_logprobs: Tensor | None = None
    """[N, K] of the ids that were handed over; anything at `NO_ID`."""
    rest: Tensor | None = None
    """[N] log of the probability outside `top_ids` and the chosen ids together, at least `REST_FLOOR`."""
    states: Tensor | None = None
    """[N, H] in the dtype that the model computes in."""
    spans: Tensor | None = None
    """[N] int64 of a model with another tokenizer: the span of each token (`algo.spans`), from 0 in every answer; -1: it says
    nothing of it. The last token of a span has the span's log-prob, the others 0."""

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        """Every tensor that is there, changed."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: change(value) for name, value in found.items() if value is not None})

    def cpu(self) -> TokenScores:
        return self.map(lambda values: values.cpu())

    def split(self, lengths: Sequence[int]) -> list[TokenScores]:
        """Of rollouts of these lengths, one after the other."""
        pieces: list[dict[str, Tensor]] = [{} for _ in lengths]
        for one in fields(self):
            values = getattr(self, one.name)
            if values is not None:
                for piece, part in zip(pieces, values.split(list(lengths)), strict=True):
                    piece[one.name] = part
        return [TokenScores(**piece) for piece in pieces]


@torch.no_grad()
def scores_of_logits(
    logits: Tensor, targets: Tensor, wanted: Wanted = NOTHING, chosen: Tensor | None = None, work: Tensor | None = None
) -> TokenScores:
    """Scores of tokens `targets` [R] from logits [R, V] at the sampling temperature, which are overwritten.

    `chosen` [R, K] holds the ids whose log-probs are wanted, `NO_ID` where there is none. `work` is a spare [R, V].
    """
    if wanted.chosen and chosen is None:
        raise ValueError("log-probs of chosen ids are wanted, but no ids were given")
    size = logits.shape[-1]
    if wanted.top_k > size:
        raise ValueError(f"top_k is {wanted.top_k}, the vocabulary has {size} ids")
    outside = targets >= size  # a padding row of the matrix: no id that can occur
    picked = logits.gather(1, targets.clamp(max=size - 1)[:, None]).squeeze(1)
    top = logits.topk(wanted.top_k, -1) if wanted.top_k else None
    at = None
    if wanted.chosen and chosen is not None:
        at = torch.where((chosen >= 0) & (chosen < size), logits.gather(1, chosen.clamp(0, size - 1)), -torch.inf)
    largest = logits.amax(1, keepdim=True)
    shifted = logits.sub_(largest).clamp_(min=torch.finfo(logits.dtype).min / 4)  # -inf * 0 would be NaN
    if wanted.entropy:
        scaled = torch.exp(shifted, out=work)
        total = scaled.sum(1, keepdim=True)
        entropy = (total.log() - shifted.mul_(scaled).sum(1, keepdim=True) / total).squeeze(1)
    else:
        scaled, entropy = shifted.exp_(), None
        total = scaled.sum(1, keepdim=True)
    log_total = total.log()
    rest = None
    if top is not None or at is not None:
        if top is not None:
            scaled.scatter_(1, top.indices, 0.0)
        if at is not None and chosen is not None:  # an empty place zeroes the first id of the token again
            scaled.scatter_(1, _filled(chosen, size, top), 0.0)
        rest = (scaled.sum(1, keepdim=True).log() - log_total).clamp_(min=REST_FLOOR).squeeze(1)
    logprobs = torch.where(outside, -torch.inf, picked - largest.squeeze(1) - log_total.squeeze(1))
    return TokenScores(
        logprobs,
        entropy,
        None if top is None else top.indices,
        None if top is None else top.values - largest - log_total,
        None if at is None else at - largest - log_total,
        rest,
    )


def _filled(chosen: Tensor, size: int, top: Any) -> Tensor:
    """Chosen ids [R, K] with empty places filled by an id of the same token that is in the support anyway."""
    real = (chosen >= 0) & (chosen < size)
    first = chosen.gather(1, real.int().argmax(1, keepdim=True)) if top is None else top.indices[:, :1]
    return torch.where(real, chosen, first.clamp(0, size - 1))


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    wanted: Wanted = NOTHING,
    *,
    chosen: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> TokenScores:
    """Scores of tokens `targets` [N] from hidden states [N, H] and the output matrix [V, H], a few rows at a time."""
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets have shape {list(targets.shape)}, hidden states {list(hidden.shape)}")
    checks = Checks()
    ids = head.token_ids(targets, checks)
    checks.settle()
    parts = []
    for chunk in row_chunks(head, hidden, spare=int(wanted.entropy)):
        given = None if chosen is None else chosen[chunk.rows]
        parts.append(scores_of_logits(chunk.logits, ids[chunk.rows], wanted, given, *chunk.spare))
    found = joined_scores(parts) if parts else _none(hidden, wanted, head.dtype, chosen)
    return replace(found, states=hidden) if wanted.states else found


def joined_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Scores of several sets of tokens, one after the other. All have the same fields."""
    names = [one.name for one in fields(TokenScores) if getattr(parts[0], one.name) is not None]
    return TokenScores(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _none(hidden: Tensor, wanted: Wanted, dtype: torch.dtype, chosen: Tensor | None) -> TokenScores:
    """The scores of no tokens."""
    nothing = torch.empty(0, dtype=dtype, device=hidden.device)
    rows = torch.empty(0, wanted.top_k, dtype=dtype, device=hidden.device)
    return TokenScores(
        nothing,
        nothing if wanted.entropy else None,
        rows.long() if wanted.top_k else None,
        rows if wanted.top_k else None,
        None if chosen is None or not wanted.chosen else torch.empty(0, chosen.shape[1], dtype=dtype, device=hidden.device),
        nothing if wanted.top_k or wanted.chosen else None,
    )

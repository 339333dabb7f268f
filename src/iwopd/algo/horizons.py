"""Where an answer stops teaching: the positions at which it is looked at, and whether it goes on from there.

An answer is written in blocks. At the end of each one the teacher has scored all of it, and a weight rule says what the next
token would weigh. Below a threshold the answer stops there; the whole block stays. All of this is a function of the answer
alone, so stopping while it is written and cutting it afterwards give the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch
from iwopd.algo.registry import WEIGHT_RULES, WeightRule
from iwopd.algo.weights import token_weights

GROWTH = 8
"""From so many blocks on, the next block is this part of what is written: at most an eighth is written in vain."""


def next_look(length: int, block: int) -> int:
    """The next position after `length` at which an answer is looked at: a multiple of `block`, further away in long answers."""
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    end = 0
    while end <= length:
        end += block * max(1, end // (GROWTH * block))
    return end


@torch.no_grad()
def next_weights(gap: Tensor, mask: Tensor, rule: str = "survival", params: Mapping[str, Any] | None = None) -> Tensor:
    """What the rule would give to the token after the last one of each rollout [B], from gaps [B, T] (right-padded)."""
    check_batch(mask, gap=gap)
    lengths = mask.sum(-1, keepdim=True)
    longer = torch.arange(mask.shape[1] + 1, device=mask.device) <= lengths
    gaps = torch.where(mask, gap, 0.0)
    weights = token_weights(rule, torch.nn.functional.pad(gaps, (0, 1)), longer, **dict(params or {}))
    return weights.gather(1, lengths).squeeze(1)


@torch.no_grad()
def cut_lengths(
    gap: Tensor,
    mask: Tensor,
    *,
    threshold: float,
    block: int = 8,
    rule: str = "survival",
    params: Mapping[str, Any] | None = None,
) -> Tensor:
    """Tokens [B] that a drift horizon leaves of whole rollouts: "write everything, then cut"."""
    check_threshold(threshold)
    lengths = mask.sum(-1)
    kept, end = lengths.clone(), next_look(0, block)
    while end < mask.shape[1]:  # a look at the very end changes nothing
        seen = torch.arange(mask.shape[1], device=mask.device) < end
        low = next_weights(gap, mask & seen, rule, params) < threshold
        kept = torch.where(low & (kept > end), end, kept)
        end = next_look(end, block)
    return kept


def check_threshold(threshold: float) -> None:
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie in (0, 1), got {threshold}: it is a weight below which an answer stops")


def check_stopping_rule(name: str, params: Mapping[str, Any]) -> None:
    """Refuse a rule whose weight of a token cannot be known when the tokens before it are written."""
    rule = WEIGHT_RULES[name]
    if rule.batch_dependent or set(rule.needs) - {"gap", "mask", "agreement"} or params.get("normalize") is not None:
        raise ValueError(
            f"weight rule {name!r} cannot stop answers: it looks at more than one answer's gaps ({_looks_at(rule, params)}). "
            "Choose 'survival'"
        )
    known = {"agreement": 0.2} if follows_gradients(name) else {}
    if not _is_causal(name, {**params, **known}):
        raise ValueError(
            f"weight rule {name!r} cannot stop answers: its weight of a token depends on tokens that come after it. "
            "Choose 'survival'"
        )


def follows_gradients(rule: str) -> bool:
    """Whether the rule asks for the agreement of gradients, which changes from step to step."""
    return "agreement" in WEIGHT_RULES[rule].needs


def _looks_at(rule: WeightRule, params: Mapping[str, Any]) -> str:
    if rule.batch_dependent or params.get("normalize") is not None:
        return "the rest of the batch"
    return ", ".join(sorted(set(rule.needs) - {"gap", "mask", "agreement"}))


def _is_causal(name: str, params: Mapping[str, Any], tokens: int = 300) -> bool:
    """Whether the weights of a prefix stay as they are when more is written, on a few random gaps."""
    gap = torch.randn(3, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones_like(gap, dtype=torch.bool)
    whole = token_weights(name, gap, mask, **dict(params))
    for length in (1, 7, 60, 97, 150, 299):
        part = token_weights(name, gap[:, :length], mask[:, :length], **dict(params))
        if not torch.allclose(part, whole[:, :length], rtol=0, atol=1e-9):
            return False
    return True

"""Weight rules of related papers, most of them fed by more evidence than log-probs. `docs/method.md` compares them.

Registered like those of `weights.py`, which does the checks. Papers that do more than weigh tokens are represented by their
weights alone, and the source says so.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from iwopd.algo._checks import keep, wide
from iwopd.algo.position import bin_values, position_bins
from iwopd.algo.registry import POSITIVE, register
from iwopd.algo.weights import ceil_share

OUTLIERS = 0.98
"""TIP cuts the student's entropies at this quantile of the batch."""
EPSILON = 1e-6
"""SOD adds it to both divergences of a quotient, in nats."""


@register(
    "teacher-entropy",
    title="Unsure teacher (EOPD's gate)",
    family="evidence",
    formula="base + boost where H_T[t] > tau, else base",
    source="EOPD (arXiv 2603.07079): its gate alone, as in another paper's public code; not the forward KL behind it",
)
def teacher_entropy_gate(teacher_entropy: Tensor, *, tau: float = 0.8, base: float = 1.0, boost: float = 1.0) -> Tensor:
    """More weight where the teacher's next-token distribution has more than `tau` nats.

    EOPD adds a forward KL on these tokens to the reverse KL on all. `base = 0` is the gate by itself: with the objective
    `divergence` and `forward-kl` it is that second term.
    """
    for name, value in (("tau", tau), ("base", base), ("boost", boost)):
        _check_not_negative(name, value)
    if not base + boost:
        raise ValueError("base and boost are both 0, so no token would be trained on: make one of them positive")
    return base + boost * wide(teacher_entropy > tau)


@register(
    "tip",
    title="Selected tokens (TIP)",
    family="evidence",
    formula="1 on the ceil(ratio * T) tokens with the largest s = h + d - h d, else 0 (and out of the denominator);"
    "  h, d: student entropy and KL, each from 0 to 1 over the batch",
    source="TIP (arXiv 2604.14084), as in others' notes and code; k > 0 (the KL over the student's k likeliest ids) is ours",
    batch_dependent=True,
    supervised=POSITIVE,
)
def tip(mask: Tensor, student_entropy: Tensor, kl: Tensor, *, ratio: float = 0.5, k: int = 0) -> Tensor:
    """Only tokens where the student is unsure or the two disagree (a soft "or"). Of equal ones the earlier are taken.

    `k` says over which ids `kl` was taken (`Objective.kl_k`).
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must lie in (0, 1], got {ratio}: it is the share of the tokens that are trained on")
    unsure, apart = _from_zero_to_one(student_entropy, mask, OUTLIERS), _from_zero_to_one(kl, mask)
    score = torch.where(mask, unsure + apart - unsure * apart, -1.0)
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(mask.shape[-1], device=mask.device).expand_as(order))
    return wide(mask & (rank < ceil_share(ratio, mask)))


def _from_zero_to_one(values: Tensor, mask: Tensor, most: float = 1.0) -> Tensor:
    """`values` over the batch's valid tokens, cut at the quantile `most`; 0 where all are equal."""
    valid = values[mask]  # [N]
    if not len(valid):
        return values
    low, high = valid.min(), valid.kthvalue(math.ceil(most * len(valid))).values
    return (values.clamp(max=high) - low) / torch.where(high > low, high - low, 1.0)


@register(
    "prune",
    title="Pruned by overlap (Prune-OPD)",
    family="evidence",
    formula="base + clip(1 - drop * c[t], 0, 1),  c[t] = sum_{j<=t} [overlap of the k likeliest ids < threshold]",
    source="Prune-OPD (arXiv 2605.07804), as in its public code; its length budget is not part of it",
)
def prune(
    top_overlap: Tensor,
    mask: Tensor,
    *,
    k: int = 16,
    threshold: float = 0.7,
    drop: float = 0.01,
    base: float = 0.5,
) -> Tensor:
    """Every token at which the two models hardly share their likely ids lowers the weight of all that follow."""
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie in [0, 1], got {threshold}")
    for name, value in (("drop", drop), ("base", base)):
        _check_not_negative(name, value)
    enough = math.ceil(Fraction(str(threshold)) * k)  # in ids: 0.7 of 10 must not depend on how a float rounds
    bad = mask & ((top_overlap * k).round() < enough)
    return base + (1.0 - drop * wide(bad.cumsum(-1))).clamp(0.0, 1.0)


@register(
    "sod",
    title="Segments (SOD)",
    family="sums",
    formula="min((d[1] + 1e-6) / (d[s] + 1e-6), 1 + delta),  d[s] = mean |a| of the token's segment s of so many tokens",
    source="SOD (arXiv 2605.07725, Eq. 6-7, telescoped), as in its public code; its segments are an agent's turns",
)
def sod(gap: Tensor, mask: Tensor, *, tokens: int = 64, delta: float = 0.5) -> Tensor:
    """The first segment's divergence over the own one's: less weight where the two disagree more than at the beginning.

    A rule sees no text, so segments are fixed numbers of tokens.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    _check_not_negative("delta", delta)
    index = position_bins(mask, tokens)  # [B, T], -1 outside the mask
    segments = int(index.max()) + 1 if index.numel() else 0
    if not segments:
        return torch.zeros_like(gap)
    apart = bin_values(gap.abs(), index, segments).rollout_means + EPSILON  # [B, S], NaN where a rollout has ended
    weights = (apart[:, :1] / apart).clamp(max=1.0 + delta)
    return keep(weights.gather(1, index.clamp(min=0)), mask)


@register(
    "rising",
    title="Rising with position (PW-OPSD)",
    family="position",
    formula="floor + (1 - floor) * sigmoid(((t - 0.5) / T - middle) / width)",
    source="PW-OPSD (arXiv 2605.21606), as in its public code; there of a forward KL to a teacher that knows the answer",
)
def rising(mask: Tensor, *, floor: float = 0.25, middle: float = 0.3, width: float = 0.1) -> Tensor:
    """Less weight on the beginning, more on the rest: the opposite of IW-OPD's direction."""
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must lie in [0, 1], got {floor}")
    if not (math.isfinite(width) and width > 0):
        raise ValueError(f"width must be positive and finite, got {width}")
    if not math.isfinite(middle):
        raise ValueError(f"middle must be finite, got {middle}")
    place = (wide(mask.cumsum(-1)) - 0.5) / wide(mask.sum(-1, keepdim=True)).clamp(min=1.0)
    return floor + (1.0 - floor) * ((place - middle) / width).sigmoid()


@register(
    "scope",
    title="Right and wrong rollouts (SCOPE)",
    family="evidence",
    formula="n * softmax(m / tau) over a prompt's n right rollouts, m = -mean lp_0;  over its n wrong ones, m = mean lp_T",
    source="SCOPE (arXiv 2604.10688), as in its README: its weights alone; there right rollouts are trained by likelihood",
    batch_dependent=True,
)
def scope(
    mask: Tensor, correct: Tensor, prompt: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, *, tau: float = 1.0
) -> Tensor:
    """Of right rollouts (reward above 0.5) those that surprise the student, of wrong ones those that the teacher finds likely.

    Mean 1 over a prompt's right, and over its wrong rollouts; 1 for the only one, and for one without a verdict (NaN).
    """
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be positive and finite, got {tau}")
    known = mask.any(-1) & ~correct.isnan().any(-1)
    if not known.any():
        return wide(torch.ones_like(mask))
    first = mask.int().argmax(-1, keepdim=True)
    right = correct.gather(1, first).squeeze(1) > 0.5
    length = mask.sum(-1)
    likes = torch.where(right, -old_logprobs.sum(-1), teacher_logprobs.sum(-1)) / length.clamp(min=1) / tau  # [B]
    prompts = prompt.gather(1, first).squeeze(1)
    groups = torch.stack([prompts, right.to(prompts.dtype)], 1)[known].unique(dim=0, return_inverse=True)[1]  # [known]
    values = likes[known]
    largest = values.new_full((len(values),), -math.inf).scatter_reduce_(0, groups, values, "amax")
    scaled = (values - largest[groups]).exp()
    mean = torch.zeros_like(values).index_add_(0, groups, scaled) / groups.bincount(minlength=len(values))
    weights = torch.ones_like(likes).masked_scatter_(known, scaled / mean[groups])
    return weights[:, None].expand(mask.shape)


def _check_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {value}")

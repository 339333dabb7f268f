"""Token weights: how much of the update each token gets. One function per rule, registered by name.

A rule maps the evidence of a batch to weights. It asks for evidence by the names of its parameters (`algo.evidence`):

- `gap` [B, T]: the plain OPD gap `a[t] = lp_T[t] - lp_0[t]` (whatever the advantage is), in float64, 0 off the mask;
- `mask` [B, T]: boolean, true on valid tokens. A rollout's valid tokens are numbered 1..T in order.

`rule_weights` does the rest: checks, detachment, zeros outside the mask, dtype, normalisation. Weights are computed on
whole rollouts, before any split into mini- or micro-batches, so no split can change them.

Equation numbers are those of "On the Position Bias of On-Policy Distillation".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch_mask, check_tokens, keep, wide
from iwopd.algo.evidence import EVIDENCE, NUMBERS, Evidence, prefix_sum, prepare
from iwopd.algo.registry import POSITIVE, WEIGHT_RULES, WeightRule, register

__all__ = ["WEIGHT_RULES", "WeightRule", "rule_weights", "supervised_mask", "token_weights"]


def token_weights(name: str, gap: Tensor, mask: Tensor, *, progress: float | None = None, **params: object) -> Tensor:
    """Weights [B, T] of the rule `name` for these gaps: detached, in the gap's dtype, 0 outside the mask.

    `params` are the rule's own (`WEIGHT_RULES[name].params`) and further evidence that it needs (`WEIGHT_RULES[name].needs`).
    Every rule takes `normalize="mean-one"`, which divides by the mean over the batch's valid tokens (a control).
    `progress` in [0, 1] is the share of training done; only `curriculum` needs it.
    """
    rule = WEIGHT_RULES[name]
    evidence = {name: params.pop(name) for name in list(params) if name in rule.needs and name in EVIDENCE}
    needed = {"gap": gap, "mask": mask, "progress": progress, **evidence}
    if rule.needs_progress and progress is None:
        raise ValueError(f"weight rule {name!r} needs progress, the share of training done, in [0, 1]")
    if missing := sorted(set(rule.needs) - needed.keys()):
        raise ValueError(
            f"weight rule {name!r} needs {' and '.join(missing)}: pass {', '.join(f'{one}=...' for one in missing)}"
        )
    return _weights(rule, {name: needed[name] for name in {"gap", "mask", *rule.needs}}, params, gap.dtype)


def rule_weights(rule: WeightRule, evidence: Evidence, params: Mapping[str, object]) -> Tensor:
    """Weights [B, T] of a rule: detached, in the gap's dtype, 0 outside the mask."""
    needed = evidence.select({"mask", *rule.needs}, f"weight rule {rule.name!r}")
    return _weights(rule, needed, params, evidence.gap.dtype)


@torch.no_grad()
def _weights(rule: WeightRule, needed: Mapping[str, Any], params: Mapping[str, object], dtype: torch.dtype) -> Tensor:
    own = dict(params)
    normalize = own.pop("normalize", None)
    if normalize not in (None, "mean-one"):
        raise ValueError(f"normalize must be None or 'mean-one', got {normalize!r}")
    rule.check_params(own, "normalize")
    ready = prepare(needed)
    weights = rule.function(**{name: ready[name] for name in rule.needs}, **own)
    mask = ready["mask"]
    if weights.shape != mask.shape:
        raise ValueError(f"weight rule {rule.name!r} returned shape {list(weights.shape)} for a mask {list(mask.shape)}")
    weights = keep(weights.detach(), mask)
    if normalize == "mean-one" and (total := weights.sum()) > 0:
        weights = weights * (mask.sum() / total)
    weights = weights.to(dtype)
    check_tokens(f"the weights of rule {rule.name!r}", weights, mask)
    return weights


@torch.no_grad()
def supervised_mask(name: str, mask: Tensor, *, weights: Tensor | None = None, **params: object) -> Tensor:
    """Tokens that count in the loss's denominator: all valid ones, or those that the rule supervises.

    `weights` are the rule's own on these tokens; only a rule that supervises those with a positive weight needs them.
    """
    rule = WEIGHT_RULES[name]
    for name_of_other in ("normalize", *NUMBERS):  # `token_weights` takes them; they do not change which tokens count
        params.pop(name_of_other, None)
    rule.check_params(params, "normalize")
    check_batch_mask(mask)
    if rule.supervised is None:
        return mask.clone()
    if rule.supervised == POSITIVE:
        if weights is None:
            raise ValueError(f"weight rule {rule.name!r} supervises the tokens with a positive weight: pass its weights")
        return mask & (weights > 0)
    return rule.supervised(mask, **params) & mask


# --- the rules ------------------------------------------------------------------------------------------------------


@register("uniform", title="Uniform", family="sums", formula="1", source="standard OPD, Eq. 5")
def uniform(mask: Tensor) -> Tensor:
    """Every token counts the same."""
    return wide(torch.ones_like(mask))


@register(
    "cumulative-share",
    title="Cumulative share (IW-OPD)",
    family="sums",
    formula="1 + gamma * (1 - S[t] / total),  S[t] = sum_{k<t} |a[k]|;  blend=False: 1 - S[t] / total",
    source="IW-OPD: Eq. 17 and Algorithm 1; without blend Eq. 16 (Tab. 4, surrogate weight only)",
)
def cumulative_share(
    gap: Tensor, mask: Tensor, *, gamma: float = 0.5, total: Literal["paper", "all"] = "paper", blend: bool = True
) -> Tensor:
    """IW-OPD: the share of the rollout's disagreement that is still ahead.

    `total="paper"` sums `k < T` (the last token excluded, as printed); `"all"` sums `k <= T`, as the authors' released
    code and TRL do. Where the total is 0 the share spent is 0. Without `blend`, `gamma` plays no part.
    """
    _check_gamma(gamma)
    spent = _share(gap.abs(), mask, total).clamp(0.0, 1.0)
    # A parallel prefix sum may dip by an ulp; the weight must never rise along a rollout.
    left = 1.0 - (spent.cummax(dim=-1).values if spent.shape[-1] else spent)
    return 1.0 + gamma * left if blend else left


@register(
    "signed",
    title="Signed sum",
    family="sums",
    formula="1 + gamma * clip(1 - sum_{k<t} a[k] / total, 0, 1),  total = sum_{k<T} a[k]",
    source="Eq. 14 normalised; Tab. 4 and Fig. 4c, signed sum of A_k; clipped as the released code does",
)
def signed(gap: Tensor, mask: Tensor, *, gamma: float = 0.5, total: Literal["paper", "all"] = "paper") -> Tensor:
    """IW-OPD without the absolute value: disagreements of opposite sign cancel, so the weight can rebound."""
    _check_gamma(gamma)
    return 1.0 + gamma * (1.0 - _share(gap, mask, total)).clamp(0.0, 1.0)


@register(
    "ideal",
    title="Ideal weight",
    family="ideal",
    formula="r[t]^alpha / Z[t],  log r[t] = sum_{k<t} a[k],  Z[t] = batch mean of r[t]^alpha;  gamma: 1 + gamma * that",
    source="Proposition 2, Eq. 11, in the form of Eq. 46; Fig. 4a-b; Tab. 4, ideal weight with and without OPD blend",
    batch_dependent=True,
)
def ideal(gap: Tensor, mask: Tensor, *, alpha: float = 0.01, gamma: float | None = None) -> Tensor:
    """The derivation's own weight: the prefix likelihood ratio, normalised at each position.

    The paper's Z is an expectation per prompt; with one rollout per prompt only a mean over the batch's rollouts that
    reach `t` can be estimated, so this is the one rule whose weights depend on the rest of the batch.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha must be finite and not negative, got {alpha}")
    log_ratio = alpha * prefix_sum(gap)
    ratios = log_ratio[mask]  # [N], the valid tokens of all rollouts in one row
    position = (mask.cumsum(-1) - 1)[mask]  # [N]
    length = mask.shape[-1]
    largest = ratios.new_full((length,), -math.inf).scatter_reduce_(0, position, ratios, "amax")
    scaled = (ratios - largest[position]).exp()
    mean = ratios.new_zeros(length).index_add_(0, position, scaled) / position.bincount(minlength=length)
    weights = torch.zeros_like(gap).masked_scatter_(mask, scaled / mean[position])
    if gamma is None:
        return weights
    _check_gamma(gamma)
    return 1.0 + gamma * weights


@register(
    "fixed-prefix",
    title="Amplify fixed prefix",
    family="position",
    formula="factor on the first ceil(ratio * T) tokens, else 1",
    source="Tab. 4, amplify fixed prefix",
)
def fixed_prefix(mask: Tensor, *, ratio: float = 0.3, factor: float = 1.5) -> Tensor:
    """More weight on a fixed share of the response."""
    return torch.where(_prefix(mask, ratio), _check_factor(factor), wide(torch.ones_like(mask)))


@register(
    "linear-decay",
    title="Linear decay",
    family="position",
    formula="1 + gamma * (1 - (t-1) / (T-1));  1 + gamma for T = 1",
    source="Tab. 4, linear decay",
)
def linear_decay(mask: Tensor, *, gamma: float = 0.5) -> Tensor:
    """Falls linearly with the position, whatever the gaps are."""
    _check_gamma(gamma)
    position = wide(mask.cumsum(-1)) - 1.0
    last = (wide(mask.sum(-1, keepdim=True)) - 1.0).clamp(min=1.0)
    return 1.0 + gamma * (1.0 - position / last)


@register(
    "curriculum",
    title="Manual curriculum",
    family="position",
    formula="factor on the first ceil(ratio(p) * T) tokens, else 1;  ratio(p) = start + (end-start) * (1-cos(pi p)) / 2,"
    " or linear in p",
    source="Tab. 4, manual curriculum",
)
def curriculum(
    mask: Tensor,
    *,
    progress: float,
    start: float = 0.3,
    end: float = 1.0,
    schedule: Literal["cosine", "linear"] = "cosine",
    factor: float = 1.5,
) -> Tensor:
    """An amplified prefix that grows over training from `start` to `end` of the response."""
    _check_ratio(start, "start")
    _check_ratio(end, "end")
    if schedule not in ("cosine", "linear"):
        raise ValueError(f"schedule must be 'cosine' or 'linear', got {schedule!r}")
    eased = (1.0 - math.cos(math.pi * progress)) / 2.0 if schedule == "cosine" else progress
    ratio = round(start + (end - start) * eased, 12)  # 0.30000000000000004 must not cost a token
    return fixed_prefix(mask, ratio=ratio, factor=factor)


def _prefix(mask: Tensor, ratio: float = 0.3) -> Tensor:
    return mask & (mask.cumsum(-1) <= ceil_share(ratio, mask))


def _suffix(mask: Tensor, ratio: float = 0.3) -> Tensor:
    return mask & (mask.cumsum(-1) > mask.sum(-1, keepdim=True) - ceil_share(ratio, mask))


@register(
    "prefix-only",
    title="Prefix only",
    family="position",
    formula="1 on the first ceil(ratio * T) tokens, else 0 (and out of the denominator)",
    source="Fig. 1a, Prefix-30",
    supervised=_prefix,
)
def prefix_only(mask: Tensor, *, ratio: float = 0.3) -> Tensor:
    """Train on the beginning of each response only."""
    return wide(_prefix(mask, ratio))


@register(
    "suffix-only",
    title="Suffix only",
    family="position",
    formula="1 on the last ceil(ratio * T) tokens, else 0 (and out of the denominator)",
    source="Fig. 1a, Suffix-30",
    supervised=_suffix,
)
def suffix_only(mask: Tensor, *, ratio: float = 0.3) -> Tensor:
    """Train on the end of each response only."""
    return wide(_suffix(mask, ratio))


@register(
    "survival",
    title="Survival",
    family="sums",
    formula="floor + (1 - floor) * exp(-D[t] / tau),  D[t] = sum_{k<t} d[k],  d = max(-a, 0);  count='all': d = |a|",
    source="ours (docs/results.md). Its exp(-D / tau) is prod_{k<t} min(1, p_T / p_0)^(1/tau): TrOPD's acceptance (arXiv"
    " 2606.01249) over the prefix, IW-OPD's ideal ratio without what is above 1; Prune-OPD (arXiv 2605.07804) counts instead",
)
def survival(
    gap: Tensor, mask: Tensor, *, tau: float = 1.0, floor: float = 0.0, count: Literal["negative", "all"] = "negative"
) -> Tensor:
    """How far the prefix has already left the teacher, in nats, whatever is still to come.

    `tau` nats cost a factor e, whatever the rollout's total (IW-OPD's share is relative to it). `negative` counts only tokens
    that the teacher likes less than the student does.
    """
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be positive and finite (nats), got {tau}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must lie in [0, 1], got {floor}")
    if count not in ("negative", "all"):
        raise ValueError(f"count must be 'negative' or 'all', got {count!r}")
    lost = prefix_sum(gap.abs() if count == "all" else (-gap).clamp(min=0.0))
    return floor + (1.0 - floor) * (-lost / tau).exp()


# --- their parts ----------------------------------------------------------------------------------------------------


def _share(values: Tensor, mask: Tensor, total: str) -> Tensor:
    """`sum_{k<t} values[k] / total`, 0 where the total is 0. Taken from the same sums, so it is exactly 1 at `t = T`."""
    before = prefix_sum(values)
    if total == "paper":  # k < T: what stands before the last valid token
        is_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
        denominator = torch.where(is_last, before, 0.0).sum(-1, keepdim=True)
    elif total == "all":  # k <= T
        denominator = values.sum(-1, keepdim=True)
    else:
        raise ValueError(f"total must be 'paper' (k < T) or 'all' (k <= T), got {total!r}")
    return torch.where(denominator == 0, 0.0, before / denominator)


def ceil_share(ratio: float, mask: Tensor) -> Tensor:
    """`ceil(ratio * T)` for every rollout [B, 1], exact for the decimal the user wrote: floats get 0.3 * T wrong."""
    exact = Fraction(str(_check_ratio(ratio)))
    counts = [math.ceil(exact * length) for length in mask.sum(-1).tolist()]
    return torch.tensor(counts, dtype=torch.long, device=mask.device).unsqueeze(-1)


def _check_gamma(gamma: float) -> None:
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma must be finite and not negative, got {gamma}")


def _check_factor(factor: float) -> float:
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"factor must be finite and not negative, got {factor}")
    return float(factor)


def _check_ratio(ratio: float, name: str = "ratio") -> float:
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {ratio}")
    return ratio

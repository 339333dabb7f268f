"""Where in an answer the two models disagree: gap, KL, overlap, drift and prefix likelihood by position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.budget import region_share
from iwopd.algo.drift import drift_regions, first_drift
from iwopd.algo.position import Binned, PositionProfile, bin_values, fraction_bins, position_profile
from iwopd.analysis.probe.intervals import Bootstrap
from iwopd.analysis.probe.result import Drift, Likelihood, Positions, PrefixLikelihood, TopKOverlap
from iwopd.analysis.probe.scoring import Tokens

FIRST = 0.3
"""The beginning of a response, as in Prefix-30 (Fig. 1a)."""
FINE_BINS = 100
"""Bins in which the place is looked for where half of the discrepancy is spent."""
TOKEN_BINS = 64
"""Most bins by absolute position."""


def measure_positions(tokens: Tokens, bootstrap: Bootstrap, bins: int) -> Positions:
    """Mean |gap|, signed gap and KL by relative position, and how the total of |gap| is spread (Fig. 3b)."""
    profile = position_profile(tokens.gap, tokens.mask, bins=bins, kl=tokens.kl)
    assert profile.kl is not None  # it was given
    gap = bin_values(tokens.gap, fraction_bins(tokens.mask, bins), bins)
    fine = bin_values(tokens.gap.abs(), fraction_bins(tokens.mask, FINE_BINS), FINE_BINS)
    lengths = tokens.mask.sum(-1)
    size = _summed(tokens.gap.abs(), tokens.mask)
    return Positions(
        edges=profile.edges.tolist(),
        tokens=profile.tokens.tolist(),
        abs_gap=bootstrap.mean_curve(profile.abs_gap),
        gap=bootstrap.mean_curve(gap),
        kl=bootstrap.mean_curve(profile.kl),
        share=bootstrap.share_curve(profile.abs_gap),
        kl_share=bootstrap.share_curve(profile.kl),
        mean_abs_gap=bootstrap.estimate(torch.div, size, lengths),
        mean_kl=bootstrap.estimate(torch.div, _summed(tokens.kl, tokens.mask), lengths),
        half=bootstrap.estimate(half_spent, fine.sums),
        first_30=bootstrap.estimate(region_share, _summed(tokens.gap.abs(), beginning(tokens.mask)), size),
    )


def measure_drift(tokens: Tokens, bootstrap: Bootstrap, threshold: float) -> Drift:
    """How many rollouts drift, where, and which part of the discrepancy lies before, on and after the first drift."""
    place, lengths = first_drift(tokens.gap, tokens.mask, threshold), tokens.mask.sum(-1)
    drifts = (place >= 0).double()
    relative = torch.where(place >= 0, place / lengths, 0.0)
    size = _summed(tokens.gap.abs(), tokens.mask)
    shares = {
        name: bootstrap.estimate(region_share, _summed(tokens.gap.abs(), region), size)
        for name, region in named_regions(tokens.gap, tokens.mask, threshold).items()
    }
    position = bootstrap.estimate(torch.div, relative, drifts)
    return Drift(threshold=threshold, rollouts=bootstrap.mean(drifts), position=position, **shares)


def named_regions(gap: Tensor, mask: Tensor, threshold: float) -> dict[str, Tensor]:
    """[B, T] masks of the tokens before the first drift, on it, both, and after it."""
    before, at, after = drift_regions(gap, mask, threshold)
    return {"before": before, "at": at, "until": before | at, "after": after}


def measure_top_k_overlap(tokens: Tokens, bootstrap: Bootstrap, bins: int, *, k: int, vocabulary: int) -> TopKOverlap:
    """Top-k overlap of the two models by relative position."""
    index = fraction_bins(tokens.mask, bins)
    lengths = tokens.mask.sum(-1)
    return TopKOverlap(
        k=k,
        chance=k / vocabulary,
        edges=[place / bins for place in range(bins + 1)],
        shared=bootstrap.mean_curve(bin_values(tokens.shared, index, bins)),
        same_first=bootstrap.mean_curve(bin_values(tokens.same_first, index, bins)),
        mean_shared=bootstrap.estimate(torch.div, _summed(tokens.shared, tokens.mask), lengths),
        mean_same_first=bootstrap.estimate(torch.div, _summed(tokens.same_first, tokens.mask), lengths),
    )


def measure_likelihood(tokens: Tokens, bootstrap: Bootstrap, bins: int) -> Likelihood:
    """Cumulative log-likelihood of the student's prefixes under both models (Fig. 3c), by fraction and by token."""
    logprobs: Any = {"student_logprobs": tokens.student_logprobs, "teacher_logprobs": tokens.teacher_logprobs}
    by_fraction = position_profile(tokens.gap, tokens.mask, bins=bins, **logprobs)
    width = math.ceil(tokens.mask.shape[1] / TOKEN_BINS)
    by_token = position_profile(tokens.gap, tokens.mask, by="position", width=width, **logprobs)
    student, teacher = _summed(tokens.student_logprobs, tokens.mask), _summed(tokens.teacher_logprobs, tokens.mask)
    return Likelihood(
        by_fraction=_prefixes(by_fraction, bootstrap),
        by_token=_prefixes(by_token, bootstrap),
        student=bootstrap.mean(student),
        teacher=bootstrap.mean(teacher),
        difference=bootstrap.mean(teacher - student),
    )


def half_spent(sums: Tensor) -> Tensor:
    """Relative position [...] at which half of `sums` [..., K], equal bins of the response, is reached; linear within a bin."""
    part = sums.cumsum(-1) / sums.sum(-1, keepdim=True)
    place = (part < 0.5).sum(-1).clamp(max=sums.shape[-1] - 1)  # the bin in which it happens
    before = torch.nn.functional.pad(part, (1, 0)).gather(-1, place[..., None]).squeeze(-1)
    inside = part.gather(-1, place[..., None]).squeeze(-1) - before
    return (place + (0.5 - before) / inside) / sums.shape[-1]  # NaN where there is nothing to halve


def beginning(mask: Tensor) -> Tensor:
    """The first 30 % of each response's tokens, [B, T] bool."""
    return algo.supervised_mask("prefix-only", mask, ratio=FIRST)


def _prefixes(profile: PositionProfile, bootstrap: Bootstrap) -> PrefixLikelihood:
    student, teacher = profile.student_loglikelihood, profile.teacher_loglikelihood
    assert student is not None  # both were given
    assert teacher is not None
    return PrefixLikelihood(
        edges=profile.edges.tolist(),
        rollouts=(student.counts > 0).sum(0).tolist(),
        student=bootstrap.mean_curve(student),
        teacher=bootstrap.mean_curve(teacher),
        difference=bootstrap.mean_curve(Binned(teacher.sums - student.sums, student.counts)),
    )


def _summed(values: Tensor, region: Tensor) -> Tensor:
    """[B] float64 sums over a region of each rollout."""
    return torch.where(region, values, 0.0).double().sum(-1)

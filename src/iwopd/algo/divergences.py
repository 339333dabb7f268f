"""Divergences D(p, q) of a student's distribution p and a teacher's q, as sums over outcomes: one formula, one place.

Each gives, from log p and log q of some outcomes, the terms of its sum and their slopes. Nobody here knows whether the
outcomes are a vocabulary, a part of one, or a few ids and a bucket for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo._checks import LOGPROB_FLOOR
from iwopd.registry import suggestion


class Terms(NamedTuple):
    """What each outcome adds to a divergence, in the shape of the log-probs."""

    values: Tensor
    """Their sum over outcomes is D."""
    slopes: Tensor
    """`dD / d log p_i - c p_i`, with the constant c that makes it 0 where p = q. A softmax does not see c: by its logits,
    `dD / dz_i = slopes_i - p_i sum(slopes)`. Unlike dD / dp_i they are finite where p_i is 0."""


def _reverse_kl(log_p: Tensor, log_q: Tensor, mix: float) -> Terms:
    values = log_p.exp().mul(log_p - log_q)
    return Terms(values, values)


def _forward_kl(log_p: Tensor, log_q: Tensor, mix: float) -> Terms:
    q = log_q.exp()
    return Terms(q * (log_q - log_p), log_p.exp() - q)


def _jsd(log_p: Tensor, log_q: Tensor, mix: float) -> Terms:
    if mix == 0.0:
        return _forward_kl(log_p, log_q, mix)
    if mix == 1.0:
        return _reverse_kl(log_p, log_q, mix)
    p, q = log_p.exp(), log_q.exp()
    log_m = _log(_mixture(q, p, mix))
    slopes = (1.0 - mix) * p * (log_p - log_m)
    return Terms(mix * q * (log_q - log_m) + slopes, slopes)


def _skew_forward_kl(log_p: Tensor, log_q: Tensor, mix: float) -> Terms:
    if mix == 0.0:
        return _forward_kl(log_p, log_q, mix)
    p, q = log_p.exp(), log_q.exp()
    m = _mixture(q, p, mix)
    # dD / d log p = -(1 - mix) p q / m, which is -(1 - mix) p where p = q.
    return Terms(q * (log_q - _log(m)), (1.0 - mix) ** 2 * (p - q) * (p / _some(m)))


def _skew_reverse_kl(log_p: Tensor, log_q: Tensor, mix: float) -> Terms:
    if mix == 0.0:
        return _reverse_kl(log_p, log_q, mix)
    p, q = log_p.exp(), log_q.exp()
    m = _mixture(p, q, mix)
    values = p * (log_p - _log(m))
    # dD / d log p = p (log p - log m) + (1 - mix) p q / m, of which (1 - mix) p is left where p = q.
    return Terms(values, values + mix * (1.0 - mix) * (q - p) * (p / _some(m)))


def _mixture(one: Tensor, other: Tensor, share: float) -> Tensor:
    return share * one + (1.0 - share) * other


def _some(m: Tensor) -> Tensor:
    """Not 0, where neither model has any probability that the dtype can hold."""
    return m.clamp(min=torch.finfo(m.dtype).tiny)


def _log(m: Tensor) -> Tensor:
    return _some(m).log()


@dataclass(frozen=True)
class DivergenceFormula:
    """A divergence, with what a reader and a caller must know about it."""

    formula: str
    source: str
    function: Callable[[Tensor, Tensor, float], Terms]
    """Of log p, log q and the mixture's share."""
    parameter: str | None = None
    """What the paper calls the share, if there is a mixture."""
    default: float = 0.0
    closed: bool = False
    """The share may be 1."""

    @property
    def range(self) -> str:
        return "[0, 1]" if self.closed else "[0, 1)"


GKD, DISTILLM = "GKD, arXiv 2306.13649", "DistiLLM, arXiv 2402.03898"
DIVERGENCES = {
    "reverse-kl": DivergenceFormula("KL(p || q)", "the local D_t of Appendix A.3", _reverse_kl),
    "forward-kl": DivergenceFormula("KL(q || p)", GKD, _forward_kl),
    "jsd": DivergenceFormula(
        "beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p", GKD, _jsd, "beta", 0.5, closed=True
    ),
    "skew-reverse-kl": DivergenceFormula("KL(p || alpha p + (1 - alpha) q)", DISTILLM, _skew_reverse_kl, "alpha", 0.1),
    "skew-forward-kl": DivergenceFormula("KL(q || alpha q + (1 - alpha) p)", DISTILLM, _skew_forward_kl, "alpha", 0.1),
}
"""By the names that settings, errors and docs use; p is the student, q the teacher.

At beta 0 and 1 `jsd` is forward and reverse KL, as in TRL's GKD and others: the sum itself is 0 there. It goes to 0 as
`beta KL(q || p)` and `(1 - beta) KL(p || q)`, so near the ends it is that KL on a small scale, and at the ends on the whole
one. At alpha 0 a skewed KL is the plain one, exactly."""


@dataclass(frozen=True)
class DivergenceKind:
    """One of `DIVERGENCES`, with the share of its mixture."""

    name: str = "reverse-kl"
    mix: float | None = None
    """`beta` of jsd, `alpha` of the skewed ones; None: the default, or there is none."""

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise ValueError(f"unknown divergence {self.name!r}{suggestion(self.name, list(DIVERGENCES))}")
        found = self.formula
        if found.parameter is None:
            if self.mix is not None:
                others = ", ".join(name for name, one in DIVERGENCES.items() if one.parameter)
                raise ValueError(f"divergence {self.name!r} has no mixture, got {self.mix}: leave it out, or use {others}")
            return
        mix = found.default if self.mix is None else float(self.mix)
        if not (0.0 <= mix < 1.0 or (found.closed and mix == 1.0)):
            raise ValueError(
                f"{found.parameter} of divergence {self.name!r} must lie in {found.range}, got {mix}; "
                f"the default is {found.default}"
            )
        object.__setattr__(self, "mix", mix)

    @property
    def formula(self) -> DivergenceFormula:
        return DIVERGENCES[self.name]

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        """Terms of outcomes with log-probs `log_p` and `log_q` of one shape. An impossible one counts as `LOGPROB_FLOOR`."""
        return self.formula.function(_possible(log_p), _possible(log_q), self.mix or 0.0)


def _possible(logprobs: Tensor) -> Tensor:
    """-inf as the floor: 0 * inf would be NaN. Where both are -inf nothing is left that a float can hold."""
    return logprobs.masked_fill(logprobs == -math.inf, LOGPROB_FLOOR)


def support_terms(
    kind: DivergenceKind, logprobs: Tensor, rest: Tensor, teacher_logprobs: Tensor, teacher_rest: Tensor, valid: Tensor
) -> Terms:
    """Terms [..., K + 1] of K ids and, last, of a bucket for all others: see `support_divergence`."""
    # Select before computing: what stands at empty places may be anything.
    log_p, log_q = (
        torch.cat([torch.where(valid, at, LOGPROB_FLOOR), others[..., None]], -1)
        for at, others in ((logprobs, rest), (teacher_logprobs, teacher_rest))
    )
    filled = torch.cat([valid, torch.ones_like(valid[..., :1])], -1)
    values, slopes = kind.terms(log_p, log_q)
    return Terms(torch.where(filled, values, 0.0), torch.where(filled, slopes, 0.0))


def support_divergence(
    logprobs: Tensor, rest: Tensor, teacher_logprobs: Tensor, teacher_rest: Tensor, valid: Tensor, *, kind: DivergenceKind
) -> Tensor:
    """Divergence [...] over K ids and one bucket for all others; differentiable.

    Student and teacher have log-probs [..., K] at the ids and [...] of the rest; `valid` [..., K] marks places that hold an
    id. By merging outcomes it is at most the divergence over the full vocabulary (all of them are f-divergences).
    """
    return support_terms(kind, logprobs, rest, teacher_logprobs, teacher_rest, valid).values.sum(-1)

"""Token advantages: what the teacher says about each token the student wrote. All detached, 0 outside the mask.

Shapes: every tensor is [B, T], right-padded; `mask` is boolean and true on the response's valid tokens. Registered advantages
ask for evidence by the names of their parameters, like weight rules; one that asks for `weights` applies them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from iwopd.algo._checks import check_tokens, keep, wide
from iwopd.algo.evidence import WEIGHTS, Evidence, Formula, gap
from iwopd.algo.logprobs import floor_logprobs
from iwopd.registry import Registry

REWARD_SCALE = 1.25
"""ExOPD's lambda: G-OPD's default."""


@torch.no_grad()
def opd_advantages(teacher_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Standard OPD: `A[t] = lp_T[t] - lp_0[t]`, the teacher's log-prob minus the rollout policy's.

    Eq. 6 of "On the Position Bias of On-Policy Distillation" (A^OPD). It is also the *gap* that weight rules accumulate.
    A teacher log-prob of -inf counts as `LOGPROB_FLOOR`; NaN on a valid token is an error.
    """
    return gap(teacher_logprobs, old_logprobs, mask)


@torch.no_grad()
def exopd_advantages(
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    scale: float = REWARD_SCALE,
    weights: Tensor | None = None,
) -> Tensor:
    """ExOPD's extrapolated reward (from G-OPD), and IW-ExOPD when `weights` are given.

    ExOPD:    `A[t] = scale * (lp_T[t] - lp_R[t]) - (lp_0[t] - lp_R[t])`
    IW-ExOPD: `A[t] = scale * w[t] * (lp_T[t] - lp_R[t]) - (lp_0[t] - lp_R[t])`

    The second line is this project's reading of "making the reward scale prefix-dependent" (Appendix "Combination
    experiments"; the paper prints no formula). The weights are then *inside* the advantage: do not apply them again.
    To weight the whole ExOPD advantage instead, leave `weights` out and multiply the result.

    Both are computed as `(lp_T - lp_0) + (scale * w - 1) * (lp_T - lp_R)`: the same number, and `scale = 1` is OPD
    and `w = 1` is ExOPD to the last bit.
    """
    teacher = floor_logprobs(teacher_logprobs, mask).logprobs
    reference = floor_logprobs(reference_logprobs, mask, name="reference_logprobs").logprobs
    plain = gap(teacher_logprobs, old_logprobs, mask)
    reward = keep(teacher - reference, mask)
    if weights is None:
        return keep(plain + (scale - 1.0) * reward, mask)
    check_tokens("weights", weights, mask)
    factor = (scale * wide(weights) - 1.0).to(reward.dtype)  # rounded once, like `scale - 1` above
    return keep(plain + factor * reward, mask)


@dataclass(frozen=True)
class Advantage(Formula):
    """A registered advantage: its function returns [B, T], 0 outside the mask."""

    kind: ClassVar[str] = "advantage"
    title: str = ""

    def weighted(self, evidence: Evidence, weights: Tensor, params: dict[str, Any]) -> Tensor:
        """The advantage with the weights applied, once (Eq. 13): by itself if it asks for them, else as a factor."""
        self.check_params(params)
        needed = evidence.select(self.needs, f"advantage {self.name!r}")
        if WEIGHTS in self.needs:
            return self.function(**needed, weights=weights, **params)
        return self.function(**needed, **params) * weights


ADVANTAGES: Registry[Advantage] = Registry("advantage", "iwopd.advantages", Advantage.adopt)


def advantage(name: str, *, title: str, formula: str, source: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function as the advantage `name`."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        ADVANTAGES.add(name, Advantage(name, function, formula, source, title))
        return function

    return decorate


@advantage("opd", title="OPD", formula="lp_T - lp_0", source="Eq. 6")
def opd(gap: Tensor) -> Tensor:
    """The gap itself."""
    return gap


@advantage(
    "none", title="Reward alone", formula="0: train on the reward alone", source="GRPO (arXiv 2402.03300): docs/reward.md"
)
def no_advantage(gap: Tensor) -> Tensor:
    """Nothing of the teacher's: what the reward adds is all."""
    return torch.zeros_like(gap)


@advantage(
    "exopd",
    title="ExOPD",
    formula="scale * w * (lp_T - lp_R) - (lp_0 - lp_R);  weighting='advantage': w outside",
    source="G-OPD's reward extrapolation; with weights Tab. 7 (our reading, docs/method.md)",
)
def exopd(
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    scale: float = REWARD_SCALE,
    weighting: Literal["reward-scale", "advantage"] = "reward-scale",
) -> Tensor:
    """Extrapolated reward; `weighting` says whether the weights scale the reward or the whole advantage."""
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    scores = (teacher_logprobs, old_logprobs, reference_logprobs, mask, scale)
    if weighting == "reward-scale":
        return exopd_advantages(*scores, weights)
    if weighting == "advantage":
        return exopd_advantages(*scores) * weights
    raise ValueError(f"weighting must be 'reward-scale' or 'advantage', got {weighting!r}")

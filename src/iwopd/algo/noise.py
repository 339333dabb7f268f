"""The noise floor: the mean |gap| that a pipeline would find between a model and itself.

Two paths to the log-probs of one model never agree to the last bit: another batch, another precision, another engine. With
`a[t] = lp_T[t] - lp_0[t]`, a rule that sums `|a|` along an answer (S[t] of the paper) sums the paths' differences, too, so the
sum grows by floor x tokens although teacher and student agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo._checks import check_tokens

LARGEST_SHARE = 0.1
"""Share of the pair's mean |gap| above which the floor counts as a fault."""
NEGLIGIBLE = 1e-5
"""Floor in nats a token that is never a fault: it adds up to 0.16 nats over 16,384 tokens. float32 stays below it."""


class NoiseFloor(NamedTuple):
    """Nats a token."""

    student: float
    """Mean |difference| of two paths to the student's log-probs."""
    teacher: float
    """The same of the teacher's; 0 where nobody measured it."""
    gap: float
    """Mean |lp_T - lp_0| of the pair on the same tokens."""

    @property
    def total(self) -> float:
        """Both sides added: `|e_T - e_0| <= |e_T| + |e_0|`."""
        return self.student + self.teacher

    @property
    def share(self) -> float:
        """Of the pair's gap; infinite for two equal models."""
        return self.total / self.gap if self.gap else float("inf")

    @property
    def is_fault(self) -> bool:
        return self.total > NEGLIGIBLE and self.share > LARGEST_SHARE

    def summed(self, tokens: int) -> float:
        """What the floor adds to a sum of |gap| over so many tokens, in nats."""
        return self.total * tokens


@torch.no_grad()
def mean_difference(one: Tensor, other: Tensor) -> float:
    """Mean |one - other| of two log-probs [N] of the same tokens, in float64; 0 of none."""
    everywhere = torch.ones_like(one, dtype=torch.bool)
    check_tokens("one", one, everywhere)
    check_tokens("other", other, everywhere)
    return float((one.double() - other.double()).abs().mean()) if one.numel() else 0.0

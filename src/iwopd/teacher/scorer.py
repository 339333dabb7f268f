"""What the loop asks of a teacher, wherever it lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from iwopd.types import Rollout


class Scorer(Protocol):
    """`teacher.local.LocalScorer` is one."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens, in order, at the sampling temperature; -inf where impossible."""

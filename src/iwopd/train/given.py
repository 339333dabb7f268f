"""What others wrote in a step (`rollout.mix`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iwopd.types import Rollout


@dataclass(frozen=True, eq=False)
class Given:
    """Answers that are not the student's."""

    rollouts: Sequence[Rollout] = ()
    too_long: int = 0
    """Prompts that the student answers itself, because the data set's answer is longer than an answer may be."""


NOTHING_GIVEN = Given()

"""What the loop asks of a student that talks, whatever engine it talks through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from iwopd.types import Prompt, Rollout

Listener = Callable[[int, Rollout], None]
"""Told of a rollout soon after it is finished, with its place in the list that `sample` returns; maybe in another thread."""


class Sampler(Protocol):
    """`rollout.local.LocalSampler` is one."""

    def sample(
        self, prompts: Sequence[Prompt], *, seed: int, step: int, samples: int = 1, finished: Listener | None = None
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt with the student's weights of this moment, in the order of the prompts."""

"""What everybody asks of a student that writes, whatever engine it writes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from iwopd.rollout.sampling import SamplingSettings
    from iwopd.types import Prompt, Rollout

Listener = Callable[[int, "Rollout"], None]
"""Told of a rollout soon after it is finished, with its place in the list that `sample` returns."""
UNLIMITED = 2**31
"""`context` of a sampler that takes any length."""


class Sampler(Protocol):
    """`rollout.local.LocalSampler` is one."""

    @property
    def settings(self) -> SamplingSettings: ...

    @property
    def vocab_size(self) -> int | None:
        """Ids from here on are never drawn (padding rows of the output matrix); None: the output matrix has no padding."""

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        step: int,
        samples: int = 1,
        max_tokens: Sequence[int] | None = None,
        finished: Listener | None = None,
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, prompt by prompt, with the student's weights of this moment.

        `max_tokens` sets a limit for each prompt, up to the settings'. `finished` hears of rollouts while others are written.
        """

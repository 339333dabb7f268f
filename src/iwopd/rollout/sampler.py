"""What everybody asks of a student that writes, whatever engine it writes through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.types import Prompt, Rollout

Listener = Callable[[int, Rollout], None]
"""Told of a rollout soon after it is finished, with its place in the list that `sample` returns."""
UNLIMITED = 2**31
"""`context` of a sampler that takes any length."""


class Sampler(ABC):
    """Base class of all samplers: it checks the prompts, and `write` writes."""

    settings: SamplingSettings
    vocab_size: int | None
    """Ids from here on are never drawn (padding rows of the output matrix); None: the output matrix has no padding."""
    rows: int
    """Ids that a prompt may have."""
    too_long: ClassVar[str] = "the model's max_position_embeddings is {context}; "
    """What a message says of prompts that do not fit."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""

    @abstractmethod
    def write(
        self, prompts: Sequence[Prompt], limits: Sequence[int], samples: int, seed: int, step: int, finished: Listener | None
    ) -> list[Rollout]:
        """`sample` of checked prompts, of which there is one at least."""

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
        if samples < 1:
            raise ValueError(f"samples must be >= 1, got {samples}")
        limits = [self.settings.max_tokens] * len(prompts) if max_tokens is None else list(max_tokens)
        if len(limits) != len(prompts):
            raise SamplingError(f"max_tokens has {len(limits)} limits for {len(prompts)} prompts")
        for prompt, limit in zip(prompts, limits, strict=True):
            self._check(prompt, limit)
        return self.write(prompts, limits, samples, seed, step, finished) if prompts else []

    def _check(self, prompt: Prompt, limit: int) -> None:
        if not 1 <= limit <= self.settings.max_tokens:
            raise SamplingError(f"max_tokens of {prompt.id!r} is {limit}; it must lie in 1..{self.settings.max_tokens}")
        length = len(prompt.token_ids)
        if length + limit > self.context:
            raise SamplingError(
                f"prompt {prompt.id!r} has {length} tokens: with max_tokens {limit} that is {length + limit}, but "
                f"{self.too_long.format(context=self.context)}lower max_tokens or filter long prompts"
            )
        if max(prompt.token_ids) >= self.rows:
            raise SamplingError(f"prompt {prompt.id!r} has id {max(prompt.token_ids)}; the model has {self.rows} ids")

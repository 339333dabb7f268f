"""What everybody asks of a student that writes, whatever engine it writes through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.types import Piece, Prompt, Rollout

Listener = Callable[[int, Rollout], None]
"""Told of a rollout soon after it is finished, with its place in the list that `sample` returns."""
Progress = Callable[[int, int], None]
"""Told how many more answers are finished and how many more tokens are written; often, so it must be quick."""
UNLIMITED = 2**31
"""`context` of a sampler that takes any length."""


class Watcher(Protocol):
    """Reads answers while they are written, and says which of them stop."""

    @property
    def room(self) -> int:
        """Tokens of answers under way, prompts included, that it can keep in mind."""

    def next_look(self, length: int) -> int:
        """The next position, after `length`, at which an answer is looked at. All are multiples of the first."""

    def look(self, pieces: Sequence[Piece]) -> list[bool]:
        """Which of these answers stop here; of those that have ended it does not matter.

        A piece reaches to the answer's next look or to its end. Each answer's pieces come in order, one at a time.
        """


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

    watched: ClassVar[bool] = False
    """Whether a watcher can stop its answers."""
    overrun: int = 0
    """Tokens of the last call that were written past the places where their answers stopped, and dropped."""
    progress: Progress | None = None
    """Who wants to know how far the answers are, while they are written."""
    counts_tokens: ClassVar[bool] = False
    """Whether it tells `progress` of every token itself; of the others it hears when an answer is finished."""

    @abstractmethod
    def write(
        self,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        samples: int,
        seed: int,
        step: int,
        finished: Listener | None,
        watcher: Watcher | None = None,
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
        watcher: Watcher | None = None,
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, prompt by prompt, with the student's weights of this moment.

        `max_tokens` sets a limit for each prompt, up to the settings'. `finished` hears of rollouts while others are written.
        `watcher` may stop them: they then have the stop reason `horizon`.
        """
        if samples < 1:
            raise ValueError(f"samples must be >= 1, got {samples}")
        limits = [self.settings.max_tokens] * len(prompts) if max_tokens is None else list(max_tokens)
        if len(limits) != len(prompts):
            raise SamplingError(f"max_tokens has {len(limits)} limits for {len(prompts)} prompts")
        for prompt, limit in zip(prompts, limits, strict=True):
            self._check(prompt, limit)
        if watcher is not None and not self.watched:
            raise SamplingError(
                f"{type(self).__name__} cannot stop answers while it writes them: use another horizon or engine"
            )
        if self.progress is not None and not self.counts_tokens:
            finished = _counted(self.progress, finished)
        more = {} if watcher is None else {"watcher": watcher}  # samplers of other packages may not know of it
        return self.write(prompts, limits, samples, seed, step, finished, **more) if prompts else []

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


def _counted(progress: Progress, finished: Listener | None) -> Listener:
    def hear(place: int, rollout: Rollout) -> None:
        progress(1, len(rollout))
        if finished is not None:
            finished(place, rollout)

    return hear

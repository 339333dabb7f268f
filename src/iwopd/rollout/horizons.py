"""Horizons: how far the answers of a training step are written. Evaluation always writes to the end.

A horizon is a section of settings, `[rollout.horizon]`, chosen by `type`. Another package adds one with a subclass of `Horizon`
and an entry point:

    [project.entry-points."iwopd.horizons"]
    half = "my_package.horizons:Half"
"""

from __future__ import annotations

import math
import zlib
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from iwopd.registry import Registry
from iwopd.section import Section

THRESHOLD = 0.5
"""The best of four in both worlds: a search on two lineages of each (docs/horizons.md)."""


SPARED = 0.125
"""Of a rule that follows the gradients: so many answers are written to their end, so that it can see what stopping costs."""


class Horizon(Section):
    """Base class of all horizons; by itself: `full`."""

    formula: ClassVar[str] = "everything up to rollout.max_tokens"
    source: ClassVar[str] = "every trainer"
    stops_online: ClassVar[bool] = False
    """Whether the teacher must score an answer while it is written."""

    def limit(self, max_tokens: int, progress: float) -> int:
        """Most tokens of an answer at this share of training, in [0, 1]."""
        return max_tokens

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens that a step may write; the number of its prompts follows. None: `rollout.prompts_per_step` prompts."""
        return None

    def check(self, max_tokens: int, samples: int) -> None:
        """Refuse, with a ValueError, what does not go with the longest answer and the rollouts of a prompt."""


class Full(Horizon):
    """Answers to their end."""


class Fixed(Horizon):
    """Every answer stops after so many tokens."""

    formula: ClassVar[str] = "the first `tokens` tokens"
    source: ClassVar[str] = "a prefix of fixed length, as in Fig. 1a, but the rest is not written"

    tokens: int = Field(ge=1, description="tokens of an answer")

    def limit(self, max_tokens: int, progress: float) -> int:
        return min(self.tokens, max_tokens)

    def check(self, max_tokens: int, samples: int) -> None:
        _shorter("tokens", self.tokens, max_tokens)


class Growing(Horizon):
    """A limit that grows over training."""

    model_config = ConfigDict(populate_by_name=True)
    formula: ClassVar[str] = "the first n tokens, n = from + (to - from) * s(p / until);  s(x) = x, or (1 - cos(pi x)) / 2"
    source: ClassVar[str] = "growing horizons (arXiv 2605.31490), in our reading"

    from_: int = Field(ge=1, alias="from", description="tokens of an answer at the first step")
    to: int | None = Field(None, ge=1, description="tokens at the end; empty: rollout.max_tokens")
    schedule: Literal["linear", "cosine"] = Field("linear", description="how it grows")
    until: float = Field(1.0, gt=0, le=1, description="share of training at which `to` is reached")

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.to is not None and self.from_ > self.to:
            raise ValueError(f"from is {self.from_} and to is {self.to}: a growing horizon needs from <= to")
        return self

    def limit(self, max_tokens: int, progress: float) -> int:
        done = min(1.0, progress / self.until)
        eased = done if self.schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
        end = max_tokens if self.to is None else self.to
        return min(max_tokens, math.floor(self.from_ + (end - self.from_) * eased + 1e-9))

    def check(self, max_tokens: int, samples: int) -> None:
        _shorter("from", self.from_, max_tokens)
        _shorter("to", self.to or 1, max_tokens)


class Drift(Horizon):
    """An answer stops where the weight of what would come next has fallen below a threshold."""

    formula: ClassVar[str] = "the first b tokens, b the first end of a block with w[b + 1] < threshold"
    source: ClassVar[str] = "ours (docs/horizons.md)"
    stops_online: ClassVar[bool] = True

    threshold: float = Field(THRESHOLD, description="weight below which an answer stops, in (0, 1)")
    block: int = Field(8, ge=1, description="tokens between two looks at an answer; more in long answers")
    weights: str = Field("survival", description="the weight rule that is asked, whatever the method's is")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that rule")
    spared: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the answers that never stop; empty: 1/8 if the rule follows gradients, else 0",
    )

    @model_validator(mode="after")
    def _rule_can_stop(self) -> Self:
        from iwopd.algo.horizons import check_stopping_rule, check_threshold  # late: mistakes are answered without torch

        check_threshold(self.threshold)
        check_stopping_rule(self.weights, self.params)
        if self.spared == 0 and self.follows_gradients:
            raise ValueError(
                f"spared is 0, but the rule {self.weights!r} learns from whole answers whether what follows a drift still "
                "teaches: leave it out, or set a small share like 0.125"
            )
        return self

    @property
    def follows_gradients(self) -> bool:
        """Whether the rule changes with the gradients of the steps before."""
        from iwopd.algo.horizons import follows_gradients

        return follows_gradients(self.weights)

    def spares(self, prompt_id: str) -> bool:
        """Whether the answers to this prompt never stop: by its name, whatever else is written beside it."""
        share = self.spared if self.spared is not None else SPARED * self.follows_gradients
        return zlib.crc32(prompt_id.encode()) < share * 2**32

    def next_look(self, length: int) -> int:
        """The next position at which an answer of this length is looked at."""
        from iwopd.algo.horizons import next_look

        return next_look(length, self.block)

    def check(self, max_tokens: int, samples: int) -> None:
        _shorter("block", self.block, max_tokens)


class Budget(Drift):
    """As `drift`; what stopped answers save goes to more prompts of the same step."""

    formula: ClassVar[str] = (
        "as drift; prompts of a step = (tokens + (tokens * steps so far - written so far) / 4) / tokens of a prompt"
    )
    source: ClassVar[str] = "ours (docs/horizons.md)"

    tokens: int = Field(ge=1, description="tokens that a step writes; the number of its prompts follows")

    @property
    def tokens_per_step(self) -> int | None:
        return self.tokens

    def check(self, max_tokens: int, samples: int) -> None:
        super().check(max_tokens, samples)
        if self.tokens < max_tokens * samples:
            raise ValueError(
                f"tokens is {self.tokens}, but one prompt may take {max_tokens * samples} (rollout.max_tokens x "
                "rollout.samples): raise rollout.horizon.tokens"
            )


def _shorter(name: str, value: int, max_tokens: int) -> None:
    if value > max_tokens:
        raise ValueError(
            f"{name} is {value}, longer than an answer can be ({max_tokens}: rollout.max_tokens): lower rollout.horizon.{name}"
        )


def _adopt(name: str, loaded: Any, origin: str) -> type[Horizon]:
    if not (isinstance(loaded, type) and issubclass(loaded, Horizon)):
        raise TypeError(f"expected a subclass of iwopd.rollout.horizons.Horizon, got {loaded!r}")
    return loaded


HORIZONS: Registry[type[Horizon]] = Registry("horizon", "iwopd.horizons", _adopt)
HORIZONS.add("full", Full)
HORIZONS.add("fixed", Fixed)
HORIZONS.add("growing", Growing)
HORIZONS.add("drift", Drift)
HORIZONS.add("budget", Budget)

"""Answers that others wrote (`rollout.mix`): which prompts of a step they answer, and what becomes of their answers.

What belongs to the student's own answers does not touch them: samples, horizons, `rollout.truncated`, rewards, weight rules,
the rollout correction. They have an objective of their own (`algo.objectives.mixture`) and metrics of their own, `mix/…`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.objectives import OF_OTHERS, OTHERS, Mixture, MixtureStats, needs_distributions
from iwopd.algo.views import TokenScores, Wanted
from iwopd.config import Config, MixSettings
from iwopd.teacher.scorer import Scorer
from iwopd.train.given import NOTHING_GIVEN, Given
from iwopd.train.learner import Update
from iwopd.train.micro_batch import STATES
from iwopd.train.pipeline import look
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt, Rollout, TokenBatch

Author = Callable[[Sequence[Prompt], int], list[Rollout | None]]
"""Answers to prompts of a step, by all ranks together; None: there is none that is short enough."""


def chosen_places(count: int, share: float, seed: int, step: int) -> list[int]:
    """Which of a step's `count` prompts others answer, by seed and step alone; over the steps it is `share` of them."""
    each = Fraction(str(share)) * count  # exact: 0.29 * 100 is not 29 in floats
    number = math.floor(each * step) - math.floor(each * (step - 1))
    return sorted(random.Random(f"others:{seed}:{step}").sample(range(count), number))


def mixed_loss(config: Config) -> Mixture | None:
    """What the learner executes; None: the method's objective alone."""
    mix = config.rollout.mix
    return Mixture(config.method.made, OF_OTHERS[mix.objective], mix.coefficient) if mix.active else None


def mix_needs_states(config: Config) -> bool:
    """Whether the teacher's whole distributions are needed of what others wrote."""
    return config.rollout.mix.active and needs_distributions(OF_OTHERS[config.rollout.mix.objective])


@dataclass(frozen=True, eq=False)
class Others:
    """Who writes them, and how they are scored."""

    settings: MixSettings
    seed: int
    author: Author
    states: bool = False
    """The teacher's hidden states are kept from its scores to the loss."""
    teaches: Callable[[Rollout], Tensor] | None = None
    """[T] bool: which tokens of an answer are trained on (`rollout.thinking`); None: all."""
    fingerprint: str = ""
    """Of answers that a data set brings: shows whether a resumed run has the same."""

    def write(self, prompts: Sequence[Prompt], step: int) -> tuple[list[Prompt], Given]:
        """The prompts of a step that are left for the student, and the answers to the rest."""
        places = chosen_places(len(prompts), self.settings.share_at(step), self.seed, step)
        if not places:
            return list(prompts), NOTHING_GIVEN
        answers = self.author([prompts[place] for place in places], step)
        rollouts = {place: one for place, one in zip(places, answers, strict=True) if one is not None}
        own = [prompt for place, prompt in enumerate(prompts) if place not in rollouts]
        return own, Given(list(rollouts.values()), len(places) - len(rollouts))

    def score(self, given: Given, old: Sequence[TokenScores], teacher: Scorer, ranks: Ranks) -> ScoredOthers | None:
        """With what the student says of their tokens (`old`), and the teacher if it is needed; None if they wrote nothing."""
        if not given.rollouts:
            return None
        rollouts = given.rollouts
        lp_0 = torch.cat([scores.logprobs for scores in old])
        prompts = [rollout.prompt.token_ids for rollout in rollouts]
        lp_t, states = torch.zeros_like(lp_0), None
        if self.states:
            found = look(teacher, ranks, rollouts, Wanted(states=True))
            states = torch.cat([scores.states for scores in found if scores.states is not None])
            theirs = torch.cat([scores.logprobs for scores in found])
            lp_t = algo.floor_logprobs(theirs, torch.ones_like(theirs, dtype=torch.bool)).logprobs
        batch = TokenBatch(
            prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.long),
            prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
            response_ids=torch.cat([rollout.response_ids for rollout in rollouts]),
            lengths=torch.tensor([len(rollout) for rollout in rollouts]),
            old_logprobs=lp_0,
            teacher_logprobs=lp_t,
            teacher_states=states,
        )
        taught = [torch.ones(len(one), dtype=torch.bool) if self.teaches is None else self.teaches(one) for one in rollouts]
        return ScoredOthers(batch, given, torch.cat(taught))


@dataclass(frozen=True, eq=False)
class ScoredOthers:
    """The batch of what others wrote. Its teacher log-probs are 0 where nobody asked for them."""

    batch: TokenBatch
    given: Given
    supervised: Tensor
    """[N] bool: the tokens that are trained on."""

    def join(self, own: TokenBatch | None) -> TokenBatch:
        """What the learner reads of a batch, the student's rollouts first."""
        if own is None:
            return self.batch

        def both(name: str) -> Tensor:
            return torch.cat([getattr(own, name), getattr(self.batch, name)])

        return TokenBatch(
            prompt_ids=both("prompt_ids"),
            prompt_lengths=both("prompt_lengths"),
            response_ids=both("response_ids"),
            lengths=both("lengths"),
            old_logprobs=both("old_logprobs"),
            teacher_logprobs=both("teacher_logprobs"),
        )

    def columns(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns [N] of the student's tokens, followed by those of others: 0 in what is not theirs."""
        count, taught = len(self.batch.response_ids), own.get("supervised", torch.zeros(0, dtype=torch.bool))
        found = {name: self.follow(values) for name, values in own.items()}
        found["supervised"] = torch.cat([taught, self.supervised])
        found[OTHERS] = torch.cat([torch.zeros(len(taught), dtype=torch.bool), torch.ones(count, dtype=torch.bool)])
        if (states := self.batch.teacher_states) is not None:
            before = own[STATES] if STATES in own else states.new_zeros(len(taught), *states.shape[1:])
            found[STATES] = torch.cat([before, states])
        return found

    def follow(self, values: Tensor) -> Tensor:
        """Values [N, ...] of the student's tokens with zeros for those of others."""
        return torch.cat([values, values.new_zeros(len(self.batch.response_ids), *values.shape[1:])])


def mix_metrics(given: Given, others: ScoredOthers | None, prompts: int, update: Update) -> dict[str, float]:
    """What others wrote in a step, beside so many prompts of the student."""
    answers, rollouts = len(given.rollouts), given.rollouts
    found = {"mix/share": answers / max(1, answers + prompts), "mix/too_long": given.too_long}
    if others is None:
        return {**found, "mix/token_share": 0.0, "mix/loss": math.nan, "mix/logprob": math.nan}
    tokens, taught = len(others.batch.response_ids), others.supervised
    assert isinstance(update.stats, MixtureStats)
    return {
        **found,
        "mix/token_share": int(taught.sum()) / max(1, update.tokens),
        "mix/loss": update.stats.others_mean,
        "mix/logprob": float(others.batch.old_logprobs[taught].double().mean()),
        "mix/length_mean": tokens / answers,
        "mix/truncated": sum(rollout.stop_reason == "length" for rollout in rollouts) / answers,
    }

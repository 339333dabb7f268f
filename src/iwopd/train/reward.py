"""The task reward of a run: who judges, what is refused, and what a step's verdicts become (docs/reward.md)."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import TrainingSignal
from iwopd.algo.rewards import differing_groups, reward_advantages, spread_over_tokens
from iwopd.config import Config, ConfigError, Reward
from iwopd.errors import UserError
from iwopd.eval.answers import answer_text, check_answers
from iwopd.eval.checkers import PromptChecker, prompt_checker
from iwopd.eval.workers import usable_cores
from iwopd.train.checking import Checking, Judged
from iwopd.train.refusals import Refused
from iwopd.types import Prompt, Rollout, number_prompts


def reward_refuses(config: Config) -> Iterator[Refused]:
    """What is wrong with the checker, before anything is loaded."""
    settings = config.reward
    if settings.checker is None:
        return
    try:
        checker = prompt_checker(settings.checker)
        checker.ready()
    except UserError as error:
        yield Refused(f"reward.checker is {settings.checker!r}: {error}", "correct it, or leave [reward] out")
        return
    if settings.timeout < checker.least_timeout:
        yield Refused(
            f"reward.timeout is {settings.timeout:g}, but an answer may take checker {settings.checker!r} longer than that "
            "without its being at fault",
            f"set it to {checker.least_timeout:g} or more",
        )


UNJUDGED = 0.1
"""Share of training prompts that a checker need not be able to judge: more of them are no accident."""


@dataclass(frozen=True)
class Unjudged:
    """Training prompts whose answers a checker cannot judge."""

    name: str
    """Of the checker."""
    reasons: Mapping[str, str]
    """What they lack, by prompt."""
    prompts: int
    """Of the whole set."""

    @classmethod
    def find(cls, checker: PromptChecker, name: str, prompts: Sequence[Prompt]) -> Unjudged:
        return cls(name, {one.id: why for one in prompts if (why := checker.lacks(one)) is not None}, len(prompts))

    def refuse(self) -> Iterator[Refused]:
        """Too many to be damage."""
        if len(self.reasons) > UNJUDGED * self.prompts:
            remedy = "name the field with the answers (data.sets: answer_field), filter those prompts out, or choose another"
            yield Refused(self._words(), f"{remedy} checker")

    def tolerate(self) -> Iterator[Refused]:
        """A few: they are trained on without a reward."""
        if 0 < len(self.reasons) <= UNJUDGED * self.prompts:
            yield Refused(
                self._words(), "answers to them get no reward (reward/failed counts them): correct them, or filter them out"
            )

    def _words(self) -> str:
        prompt, why = next(iter(self.reasons.items()))
        return (
            f"reward.checker = {self.name!r} cannot judge answers to {len(self.reasons):,} of {self.prompts:,} training "
            f"prompts, such as {prompt!r}: {why}"
        )


def verdict(checker: PromptChecker, prompt: Prompt, text: str) -> Judged:
    """What the checker says of one answer."""
    verdicts = check_answers(checker.check, [prompt], [text])
    if len(verdicts) != 1:
        raise ValueError(f"the checker returned {len(verdicts)} verdicts on one answer")
    if not verdicts[0].judged:
        return Judged(math.nan, f"{verdicts[0].status}: {verdicts[0].detail}")
    score = float(verdicts[0].score)
    if not 0 <= score <= 1:
        raise ValueError(f"the checker's score is {score}; it must lie in [0, 1]")
    return Judged(score)


class Rewards:
    """The checker of a run at work."""

    def __init__(self, config: Config, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
        assert config.reward.checker is not None
        self.settings, self.tokenizer = config.reward, tokenizer
        self.checker = prompt_checker(config.reward.checker)
        self.cut_off_counts = config.rollout.truncated == "keep"
        self._failed: tuple[Counter[str], int] | None = None
        self._told = False
        self.unjudged = Unjudged.find(self.checker, config.reward.checker, prompts)
        for refused in self.unjudged.refuse():
            raise ConfigError(f"{refused.message}. {refused.remedy}")

    @classmethod
    def of(cls, config: Config, tokenizer: Any, prompts: Sequence[Prompt]) -> Rewards | None:
        """None: the settings name no checker."""
        return None if config.reward.checker is None else cls(config, tokenizer, prompts)

    def begin(self) -> Checking:
        """The checks of one step."""
        return Checking(self.judge, workers=self.settings.workers or usable_cores(), timeout=self.settings.timeout)

    def judge(self, rollout: Rollout) -> Judged:
        """One rollout's verdict. What was cut off and does not teach is not judged, nor is an answer without its end."""
        if rollout.stop_reason == "horizon" or (rollout.stop_reason == "length" and not self.cut_off_counts):
            return Judged(math.nan)
        if (why := self.unjudged.reasons.get(rollout.prompt.id)) is not None:
            return Judged(math.nan, why)
        return verdict(self.checker, rollout.prompt, answer_text(self.tokenizer, rollout.response_ids))

    def step(self, evidence: Evidence, rollouts: Sequence[Rollout], wait: Callable[[], list[Judged]]) -> StepRewards:
        """Evidence [B, T] of these rollouts with what was said of each, once it is (`wait`)."""
        start = time.perf_counter()
        judged = wait()
        seconds = time.perf_counter() - start
        found = StepRewards.of(self.settings, evidence, judged, torch.tensor(number_prompts(rollouts)), seconds)
        if found.failures and self._failed is None:
            self._failed = found.failures, len(judged)
        return found

    def notice(self) -> str | None:
        """What to say of the first step in which the checker failed, once."""
        if self._told or not self._failed:
            return None
        self._told = True
        failures, count = self._failed
        why, often = failures.most_common(1)[0]
        return (
            f"the checker {self.settings.checker!r} gave no verdict on {failures.total()} of {count} rollouts, which get no "
            f"reward: {why} ({often} of them). This is said once; reward/failed counts them in every step"
        )


@dataclass(frozen=True, eq=False)
class StepRewards:
    """The rewards of a step's rollouts."""

    evidence: Evidence
    rewards: Tensor
    """[B] float64; NaN: no verdict."""
    groups: Tensor
    """[B] which rollouts belong to one prompt."""
    failures: Counter[str]
    """Why the checker gave no verdict, and how often."""
    seconds: float
    """That the step waited for the checker."""

    @classmethod
    def of(
        cls, given: Reward, evidence: Evidence, judged: Sequence[Judged], groups: Tensor, seconds: float = 0.0
    ) -> StepRewards:
        """What was said of rollouts whose evidence is [B, T]; `groups` [B] numbers their prompts."""
        rewards = torch.tensor([one.reward for one in judged], dtype=torch.float64)
        dtype = evidence.old_logprobs.dtype
        added = None  # nothing at all: bit for bit the run without a reward
        if given.coefficient:
            factors: dict[str, Any] = {"coefficient": given.coefficient, "normalize": given.normalize}
            added = reward_advantages(rewards, groups, evidence.mask, **factors).to(dtype)
        correct = spread_over_tokens(rewards, evidence.mask).to(dtype)
        failures = Counter(one.failure for one in judged if one.failure)
        return cls(replace(evidence, correct=correct, reward_advantages=added), rewards, groups, failures, seconds)

    def metrics(self, signal: TrainingSignal | None) -> dict[str, float]:
        """Both terms of the advantage by themselves, and what they are made of. `signal`: of an objective with an advantage."""
        judged = self.rewards[~self.rewards.isnan()]
        found = {
            "reward/mean": float(judged.mean()) if len(judged) else math.nan,
            "reward/groups_used": float(differing_groups(self.rewards, self.groups).double().mean()),
            "reward/failed": self.failures.total(),
            "time/reward": self.seconds,
        }
        if signal is not None:
            added, taught = self.evidence.reward_advantages, signal.supervised
            found["reward/advantage_abs_mean"] = 0.0 if added is None else _abs_mean(added[taught])
            found["distillation/advantage_abs_mean"] = _abs_mean(signal.advantages[taught])
        return found


def _abs_mean(values: Tensor) -> float:
    return float(values.double().abs().mean()) if values.numel() else 0.0

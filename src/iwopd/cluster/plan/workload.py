"""A recipe in the plan's terms: its models' shapes and the size of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from iwopd.cluster.plan.gpus import PlanError
from iwopd.cluster.plan.public_models import read_model
from iwopd.cluster.plan.rollouts import answer_lengths, measured_lengths
from iwopd.config import Config
from iwopd.models import ModelSource
from iwopd.tiny.architecture import ModelSize, new_model
from iwopd.tiny.world import max_response_tokens
from iwopd.train.loading import reference_source, reference_weights, source_of, world_recipe
from iwopd.train.memory import ModelShape, RunShape

PROMPT_TOKENS = 256
"""Assumed mean length of a prompt (a problem in its chat template), where longer ones are allowed."""
ANSWER_SHARE = 1 / 4
"""Assumed mean length of an answer as a share of the longest, where nobody says; the range then goes from half to double."""

SAMPLE = 256
"""Lengths that stand for all of a step where their order does not matter."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload(RunShape):
    """What a run asks of its GPUs."""

    longest_answer: int
    answer: float
    """Mean length of an answer."""
    answer_assumed: bool
    prompt: int
    """Mean length of a prompt."""
    quantiles: tuple[float, ...] = ()
    """Of the lengths of written answers, at even levels from 0 to 1, where a probe has measured them."""
    limit: int | None = None
    """Most tokens of an answer in training, where a horizon has one."""
    asked: int | None = None
    """Rollouts of a step, where a horizon decides their number."""

    @property
    def rollouts(self) -> int:
        return super().rollouts if self.asked is None else self.asked

    @property
    def others_share(self) -> float:
        """Of the prompts of a step, those that others answer (`rollout.mix`): the mean over training."""
        mix, steps = self.config.rollout.mix, self.config.steps
        first = steps if mix.steps is None else min(mix.steps, steps)
        return (mix.share * first + mix.afterwards * (steps - first)) / steps

    @property
    def own(self) -> int:
        """Rollouts of a step that the student writes."""
        return round(self.rollouts * (1 - self.others_share))

    @property
    def others(self) -> int:
        """Answers of a step that others wrote: one for a prompt."""
        return round(self.rollouts / self.config.rollout.samples * self.others_share)

    def others_lengths(self, count: int) -> list[int]:
        """Taken to be as long as the student's to the end: nobody says, and no horizon cuts them."""
        return replace(self, limit=None, quantiles=()).lengths(count)

    @property
    def written(self) -> float:
        """Mean length of an answer in training."""
        if not self.quantiles and self.limit is None:
            return self.answer
        lengths = self.lengths(SAMPLE)
        return sum(lengths) / len(lengths)

    def lengths(self, count: int, everyone: int | None = None) -> list[int]:
        """Of `count` answers in training; the longest is that of `everyone`."""
        if self.quantiles:
            found = measured_lengths(count, self.quantiles, everyone=everyone)
        else:
            found = answer_lengths(count, self.answer, self.longest_answer, everyone=everyone)
        most = self.longest_answer if self.limit is None else self.limit
        return [min(length, most) for length in found]

    @property
    def rows_per_update(self) -> int:
        """Rollouts of one optimizer step."""
        return self.rollouts // self.config.optim.mini_batches


def open_workload(config: Config, response_tokens: float | None = None, quantiles: Sequence[float] = ()) -> Workload:
    """Read the models' shapes and decide the lengths: assumed, of a given mean, or measured (quantiles at even levels).

    Answers are written to the end; `horizon.priced` cuts them.
    """
    recipe, served = world_recipe(config), bool(config.teacher.urls) or config.teacher.is_student
    if recipe is not None:
        student = _tiny("student", config, recipe.student.size)
        first = {} if served else {"teacher": _tiny("teacher", config, recipe.teacher.size)}
        longest_answer = config.rollout.max_tokens or max_response_tokens(recipe.operands)
        prompt = longest_prompt = 2 * recipe.operands
        response_tokens = response_tokens or min(longest_answer, max_response_tokens(recipe.operands))  # all are alike
    else:
        student = _read(config, "student")
        first = {} if served else {"teacher": _read(config, "teacher")}
        if config.rollout.max_tokens is None:
            raise PlanError("rollout.max_tokens is empty: say how long an answer may get, e.g. --rollout.max_tokens 16384")
        longest_answer, longest_prompt = config.rollout.max_tokens, config.data.max_prompt_tokens
        prompt = min(PROMPT_TOKENS, longest_prompt)
    if quantiles:
        lengths = [min(length, longest_answer) for length in measured_lengths(SAMPLE, quantiles)]
        response_tokens = sum(lengths) / len(lengths)
    if response_tokens is not None and not 1 <= response_tokens <= longest_answer:
        most = f"{longest_answer} (rollout.max_tokens, the longest answer)"
        raise PlanError(f"--response-tokens {response_tokens:g} must lie in 1..{most}")
    return Workload(
        config=config,
        student=student,
        teachers=first | _other_teachers(config),
        reference=_reference(config, student),
        longest=longest_prompt + longest_answer,
        longest_answer=longest_answer,
        answer=response_tokens if response_tokens is not None else max(1.0, longest_answer * ANSWER_SHARE),
        answer_assumed=response_tokens is None,
        prompt=prompt,
        quantiles=tuple(quantiles),
    )


def _other_teachers(config: Config) -> dict[str, ModelShape]:
    trust = config.models.trust_remote_code
    return {
        f"teacher {name!r}": read_model(ModelSource.of(other.model), f"teacher.others.{name}.model", trust_remote_code=trust)
        for name, other in config.teacher.others.items()
        if other.model is not None
    }


def _reference(config: Config, student: ModelShape) -> ModelShape | None:
    if reference_weights(config) != "model":
        return None
    return student if reference_source(config) in (None, source_of(config, "student")) else _read(config, "reference")


def _tiny(role: str, config: Config, size: ModelSize) -> ModelShape:
    return ModelShape.of(new_model(size, "plan").config, f"{role} of the world {config.models.world!r}", "embedded")


def _read(config: Config, role: str) -> ModelShape:
    source = source_of(config, role)
    assert source is not None  # the config was validated
    return read_model(source, f"models.{role}", trust_remote_code=config.models.trust_remote_code)

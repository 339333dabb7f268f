"""What a recipe asks for, in the plan's terms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from iwopd.cluster.plan.gpus import PlanError
from iwopd.cluster.plan.models import Model, describe, read_model
from iwopd.config import Config
from iwopd.config.engines import engine_type
from iwopd.tiny.models import ModelSize, new_model
from iwopd.tiny.world import max_response_tokens
from iwopd.train.loading import reference_source, source_of, world_recipe

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROMPT_TOKENS = 256
"""Assumed mean length of a prompt (a problem in its chat template), where longer ones are allowed."""
ANSWER_SHARE = 1 / 4
"""Assumed mean length of an answer as a share of the longest, where nobody says; the range then goes from half to double."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run: its models and the size of a step."""

    config: Config
    student: Model
    teacher: Model | None
    """None: behind servers, which the plan does not count."""
    longest_answer: int
    answer: float
    """Mean length of an answer."""
    answer_assumed: bool
    prompt: int

    @property
    def rollouts(self) -> int:
        return self.config.rollout.prompts_per_step * self.config.rollout.samples

    @property
    def longest(self) -> int:
        """Longest prompt and answer together."""
        most = self.config.data.max_prompt_tokens if self.config.models.world is None else self.prompt
        return most + self.longest_answer

    @property
    def updates(self) -> int:
        """Optimizer steps of one step."""
        return self.config.optim.ppo_epochs * self.config.optim.mini_batches

    @property
    def micro_batch(self) -> int:
        """Tokens of the largest micro-batch: the budget, but at least one whole rollout."""
        return max(self.longest, min(self.config.optim.token_budget, self.rollouts * self.longest))

    @property
    def compute_bytes(self) -> int:
        """Of activations and cache."""
        return 2 if self.config.precision == "bf16" else BYTES[self.config.models.dtype]

    @property
    def weight_bytes(self) -> int:
        return BYTES[self.config.models.dtype]

    @property
    def engine_weights(self) -> str:
        """Where the rollout engine has its weights: see `rollout.engine.Engine.weights`."""
        return engine_type(self.config.rollout.engine).weights

    @property
    def engine_bytes(self) -> int:
        """Of a parameter in vLLM's copy of the student."""
        config = self.config
        vllm = config.engine.server if self.engine_weights == "elsewhere" else config.engine.vllm
        return BYTES[vllm.dtype or ("bfloat16" if config.precision == "bf16" else config.models.dtype)]

    @property
    def teacher_bytes(self) -> int:
        return BYTES[self.config.models.teacher_dtype or self.config.models.dtype]

    @property
    def reference_bytes(self) -> int:
        """Of a parameter of the reference, where it is a model of its own."""
        if self.config.models.world is not None:
            return self.weight_bytes if self.config.method.made.needs_reference and not self.config.lora.rank else 0
        return self.weight_bytes if reference_source(self.config) is not None else 0

    @cached_property
    def trained(self) -> int | None:
        """Parameters of the adapter; None: all weights are trained."""
        if not self.config.lora.rank:
            return None
        import torch
        from transformers import AutoModelForCausalLM

        from iwopd.adapters import add_adapter

        auto: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(self.student.config)
            add_adapter(model, self.config.lora)
        return sum(int(parameter.numel()) for parameter in model.parameters() if parameter.requires_grad)


def open_job(config: Config, response_tokens: float | None = None) -> Job:
    """Read the models' shapes and decide the lengths."""
    recipe = world_recipe(config)
    if recipe is not None:
        student = _tiny("student", config, recipe.student.size)
        teacher: Model | None = _tiny("teacher", config, recipe.teacher.size)
        longest = config.rollout.max_tokens or max_response_tokens(recipe.operands)
        prompt = 2 * recipe.operands
        response_tokens = response_tokens or min(longest, max_response_tokens(recipe.operands))  # its answers are all alike
    else:
        student = _read(config, "student")
        teacher = None if config.teacher.urls else _read(config, "teacher")
        if config.rollout.max_tokens is None:
            raise PlanError("rollout.max_tokens is empty: say how long an answer may get, e.g. --rollout.max_tokens 16384")
        longest = config.rollout.max_tokens
        prompt = min(PROMPT_TOKENS, config.data.max_prompt_tokens)
    if response_tokens is not None and not 1 <= response_tokens <= longest:
        raise PlanError(
            f"--response-tokens {response_tokens:g} must lie in 1..{longest} (rollout.max_tokens, the longest answer)"
        )
    mean = response_tokens if response_tokens is not None else max(1.0, longest * ANSWER_SHARE)
    return Job(config, student, teacher, longest, mean, response_tokens is None, prompt)


def _tiny(role: str, config: Config, size: ModelSize) -> Model:
    return describe(f"{role} of the world {config.models.world!r}", "embedded", new_model(size, "plan").config)


def _read(config: Config, role: str) -> Model:
    source = source_of(config, role)
    assert source is not None  # the config was validated
    return read_model(source, role, trust_remote_code=config.models.trust_remote_code)

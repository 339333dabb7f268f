"""Run a model on a task: sample, decode, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iwopd.types import EvalResult, Prompt, Rollout


@dataclass(frozen=True)
class Task:
    """Problems and how to tell a right answer."""

    name: str
    prompts: Sequence[Prompt]
    check: Callable[[Prompt, str], bool]


@dataclass(frozen=True)
class Evaluation:
    """A result and what it was made of, rollout by rollout (all samples of the first problem, then of the second, ...)."""

    result: EvalResult
    rollouts: list[Rollout]
    texts: list[str]


def evaluate(
    task: Task,
    write: Callable[[Sequence[Prompt]], list[Rollout]],
    tokenizer: Any,
    *,
    samples: int = 1,
    step: int | None = None,
) -> Evaluation:
    """Score `samples` answers of every problem; `write` samples them, so that noise and engine are the caller's choice."""
    rollouts = write(task.prompts)
    texts = [str(tokenizer.decode(rollout.response_ids, skip_special_tokens=True)) for rollout in rollouts]
    right = [float(task.check(rollout.prompt, text)) for rollout, text in zip(rollouts, texts, strict=True)]
    scores = torch.tensor(right, dtype=torch.float64).reshape(len(task.prompts), samples)
    return Evaluation(EvalResult(task.name, tuple(prompt.id for prompt in task.prompts), scores, step), rollouts, texts)

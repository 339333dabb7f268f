"""Run a model on a task: sample, decode, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iwopd.eval.task import Task, Verdict
from iwopd.types import EvalResult, Prompt, Rollout

Write = Callable[[Sequence[Prompt]], list[Rollout]]
"""Samples answers: all of the first prompt, then of the second, ... The caller chooses engine and noise."""


@dataclass(frozen=True)
class Evaluation:
    """A result and its rollouts (all samples of the first problem, then of the second, ...)."""

    result: EvalResult
    rollouts: list[Rollout]
    texts: list[str]
    verdicts: list[Verdict]


def evaluate(task: Task, write: Write, tokenizer: Any, *, samples: int = 1, step: int | None = None) -> Evaluation:
    """Score `samples` answers of every problem."""
    rollouts = write(task.prompts)
    texts = [str(tokenizer.decode(rollout.response_ids, skip_special_tokens=True)) for rollout in rollouts]
    verdicts = task.check([rollout.prompt for rollout in rollouts], texts)
    scores = torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float64).reshape(len(task.prompts), samples)
    result = EvalResult(task.name, tuple(prompt.id for prompt in task.prompts), scores, step)
    return Evaluation(result, rollouts, texts, verdicts)

"""Run a model on a task: sample, decode, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from iwopd.eval.answers import answer_text, check_answers
from iwopd.eval.task import Task, Verdict
from iwopd.types import EvalResult, Prompt, Rollout

Write = Callable[[Sequence[Prompt]], list[Rollout]]
"""Samples answers: all of the first prompt, then of the second, ... The caller chooses engine and noise."""


class Answer(NamedTuple):
    rollout: Rollout
    text: str
    verdict: Verdict


Share = Callable[[Sequence[Prompt], Callable[[Sequence[Prompt]], list[Answer]]], list[Answer]]
"""Has prompts answered, by several processes perhaps, and puts the answers into the prompts' order."""


@dataclass(frozen=True)
class Evaluation:
    """A result and its rollouts (all samples of the first problem, then of the second, ...)."""

    result: EvalResult
    rollouts: list[Rollout]
    texts: list[str]
    verdicts: list[Verdict]
    sandbox: str = ""
    """In what programs were run: `Task.sandbox`."""


def evaluate(
    task: Task, write: Write, tokenizer: Any, *, samples: int = 1, step: int | None = None, share: Share | None = None
) -> Evaluation:
    """Score `samples` answers of every problem; with `share`, whoever writes an answer checks it, too."""

    def answer(prompts: Sequence[Prompt]) -> list[Answer]:
        rollouts = write(prompts)
        texts = [answer_text(tokenizer, rollout.response_ids) for rollout in rollouts]
        verdicts = check_answers(task.check, [rollout.prompt for rollout in rollouts], texts) if rollouts else []
        return [Answer(*parts) for parts in zip(rollouts, texts, verdicts, strict=True)]

    answers = answer(task.prompts) if share is None else share(task.prompts, answer)
    scores = torch.tensor([one.verdict.score for one in answers], dtype=torch.float64).reshape(len(task.prompts), samples)
    result = EvalResult(task.name, tuple(prompt.id for prompt in task.prompts), scores, step)
    parts = [one.rollout for one in answers], [one.text for one in answers], [one.verdict for one in answers]
    return Evaluation(result, *parts, sandbox=task.sandbox)

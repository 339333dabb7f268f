"""Evaluation while verl trains: verl samples the answers (its validation), our own checkers judge them.

The problems of all tasks are in one file (`verl/val.parquet`), each with its task and id where verl expects a ground truth.
verl writes the answers of a step to `verl/validation-NNN/<step>.jsonl`; the launcher checks them while the job runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from iwopd.cluster.verl.translate import prompt_tokens, response_tokens
from iwopd.config import Config
from iwopd.data.fields import DataError
from iwopd.eval.answers import check_answers
from iwopd.eval.runner import Evaluation
from iwopd.eval.task import Task
from iwopd.train.loading import planned_world
from iwopd.train.prompts import load_tasks
from iwopd.types import EvalResult, Prompt


def evaluated_tasks(config: Config, tokenizer: Any) -> list[Task]:
    """The tasks of the recipe; their problems must fit verl's one limit for prompts."""
    tasks = load_tasks(config, planned_world(config), tokenizer, response_tokens(config))
    limit = prompt_tokens(config)
    for task in tasks:
        if longer := [prompt for prompt in task.prompts if len(prompt.token_ids) > limit]:
            raise DataError(
                f"problem {longer[0].id!r} of {task.name} has {len(longer[0].token_ids)} tokens, and verl would cut it off at "
                f"data.max_prompt_tokens = {limit}: raise that"
            )
    return tasks


def label(task: Task, prompt: Prompt) -> str:
    """Names a problem where verl expects its ground truth."""
    return json.dumps([task.name, prompt.id])


class Validations:
    """The answers of a launch, judged in a separate thread as they arrive: checking thousands takes minutes."""

    def __init__(self, tasks: Sequence[Task], folder: Path) -> None:
        self.tasks, self.folder = tasks, folder
        self.expected = sum(len(task.prompts) * task.samples for task in tasks)
        self._seen: set[int] = set()
        self._pool = ThreadPoolExecutor(1)
        self._waiting: list[Future[list[Evaluation]]] = []

    def look(self, step: int) -> None:
        """Start judging the complete answers of all steps up to this one."""
        for path in self.folder.glob("*.jsonl") if self.tasks and self.folder.is_dir() else ():
            number = int(path.stem)
            if number <= step and number not in self._seen:
                lines = path.read_bytes().splitlines(keepends=True)
                if len(lines) == self.expected and lines[-1].endswith(b"\n"):
                    self._seen.add(number)
                    rows = [json.loads(line) for line in lines]
                    self._waiting.append(self._pool.submit(judge, self.tasks, rows, number))

    def finished(self, *, wait: bool = False) -> Iterator[Evaluation]:
        """Finished evaluations, in order."""
        while self._waiting and (wait or self._waiting[0].done()):
            yield from self._waiting.pop(0).result()

    def missing(self) -> list[int]:
        """Steps whose answers never became complete."""
        return sorted({int(path.stem) for path in self.folder.glob("*.jsonl")} - self._seen) if self.folder.is_dir() else []

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def judge(tasks: Sequence[Task], rows: Sequence[dict[str, Any]], step: int) -> list[Evaluation]:
    """Check the answers that verl wrote."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        texts.setdefault(row["gts"], []).append(row["output"])
    return [_judge(task, texts, step) for task in tasks]


def _judge(task: Task, texts: dict[str, list[str]], step: int) -> Evaluation:
    prompts = [prompt for prompt in task.prompts for _ in range(task.samples)]
    answers = [text for prompt in task.prompts for text in texts[label(task, prompt)]]
    verdicts = check_answers(task.check, prompts, answers)
    scores = torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float64)
    ids = tuple(prompt.id for prompt in task.prompts)
    return Evaluation(EvalResult(task.name, ids, scores.reshape(len(ids), task.samples), step), [], answers, verdicts)

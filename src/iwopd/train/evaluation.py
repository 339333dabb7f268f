"""Evaluation in training: the same tasks and checkers as `iwopd eval`, and the best checkpoint by one of them."""

from __future__ import annotations

import time
from typing import Any

from iwopd.config import Config
from iwopd.data.chat import ChatError
from iwopd.eval.runner import evaluate
from iwopd.eval.task import Task
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.errors import TeacherGoneError
from iwopd.train.checkpoint import CheckpointStore
from iwopd.train.kept import kept_rollouts
from iwopd.train.parts import Parts
from iwopd.train.tracking import Tracker
from iwopd.types import Rollout


def is_due(config: Config, step: int) -> bool:
    """Whether the model after this step is evaluated: before the first, every so many, after the last."""
    return step % config.eval.every == 0 or step == config.steps


def evaluate_tasks(config: Config, parts: Parts, run: RunDirectory, tracker: Tracker, step: int) -> dict[str, float]:
    """Evaluate every task that has no result of this step yet (a resumed run makes up for it); accuracy by task."""
    done = set(parts.ranks.gather({record["task"] for record in run.read("evals.jsonl") if record["step"] == step})[0])
    return {task.name: _evaluate(task, config, parts, run, tracker, step) for task in parts.tasks if task.name not in done}


def _evaluate(task: Task, config: Config, parts: Parts, run: RunDirectory, tracker: Tracker, step: int) -> float:
    start = time.perf_counter()
    sampler = parts.eval_samplers[task.name]

    def write(prompts: Any) -> list[Rollout]:
        # The same noise at every step and for every method: differences are the model's.
        return sampler.sample(prompts, seed=config.seed, step=0, samples=task.samples)

    parts.activity.stage(f"evaluating {task.name}")
    parts.activity.expect(len(task.prompts) * task.samples)
    parts.before_writing()
    evaluation = evaluate(task, write, parts.tokenizer, samples=task.samples, step=step, share=parts.ranks.share)
    if parts.ranks.is_main:
        tracker.evaluation(evaluation, time.perf_counter() - start)
        parts.activity.stage("keeping some answers for the report")
        try:
            for record in kept_rollouts(config, parts, evaluation, step):
                run.append("rollouts.jsonl", record)
        except (TeacherGoneError, ChatError) as error:  # the evaluation itself needs no teacher; nor its template
            tracker.say(f"step {step}: no rollouts of {task.name} are kept, {error}")
    parts.activity.stage("")
    return evaluation.result.mean


def keep_best(store: CheckpointStore, best_step: int | None) -> None:
    """Protect the best checkpoint from retention, and no other."""
    for step in store.protected() - {best_step}:
        store.unprotect(step)
    if best_step is not None and best_step in store.steps():
        store.protect(best_step)

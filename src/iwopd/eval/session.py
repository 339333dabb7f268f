"""`iwopd eval`: a model, tasks, a folder. Samples in chunks, so that a crash loses little and progress can be shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from iwopd.errors import UserError
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.folder import EvaluationFolder
from iwopd.eval.runner import evaluate
from iwopd.eval.task import Task
from iwopd.models import load_model, load_tokenizer, stop_ids, weights_fingerprint
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.stages import StageListener

CHUNK_ROLLOUTS = 256
"""Rollouts that are sampled and checked before they are written: what a crash can lose."""


class RequestError(UserError, ValueError):
    """Options that make no sense together."""


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how; None means the task's own protocol."""

    model: str
    tasks: Sequence[str]
    samples: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int = 0
    limit: int | None = None
    thinking: bool = False
    chat: bool = True
    data: Mapping[str, Path] | None = None
    dtype: str = "float32"
    device: str = "cpu"
    trust_remote_code: bool = False
    unsafe: bool = False
    label: Mapping[str, Any] | None = None
    """`method`, `student` and `train_seed`, for tables."""

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise RequestError(f"--samples must be at least 1, got {self.samples}")
        if self.temperature is not None and self.temperature < 0:
            raise RequestError(f"--temperature must be at least 0 (0 is greedy), got {self.temperature}")
        if self.limit is not None and self.limit < 1:
            raise RequestError(f"--limit must be at least 1, got {self.limit}")
        if not self.tasks:
            raise RequestError("no task is named; see `iwopd eval --help`")
        unused = sorted(set(self.data or {}) - set(self.tasks))
        if unused:
            raise RequestError(f"--data names {unused[0]!r}, which is not among the tasks {', '.join(self.tasks)}")


def run_evaluation(request: Request, out: Path, progress: StageListener) -> dict[str, dict[str, Any]]:
    """Evaluate and return the results of every task, as `eval.json` holds them."""
    specs = [find_task(name) for name in request.tasks]  # wrong names are found before a model is loaded
    tokenizer = load_tokenizer(request.model, trust_remote_code=request.trust_remote_code)
    tasks = [
        _as_asked(
            load_task(
                spec,
                tokenizer,
                data=(request.data or {}).get(name),
                limit=request.limit,
                thinking=request.thinking,
                chat=request.chat,
                unsafe=request.unsafe,
            ),
            request,
        )
        for name, spec in zip(request.tasks, specs, strict=True)
    ]
    folder = EvaluationFolder(out, _about(request))
    engine = _local_engine(request, tokenizer)
    return {task.name: run_task(task, engine(task), tokenizer, folder, request.seed, progress) for task in tasks}


def run_task(
    task: Task, sampler: Sampler, tokenizer: Any, folder: EvaluationFolder, seed: int, progress: StageListener
) -> dict[str, Any]:
    """Sample and check what is missing of a task, chunk by chunk."""
    began = time.perf_counter()
    done = folder.samples(task)
    waiting = [p for p in task.prompts if any((p.id, sample) not in done for sample in range(task.samples))]
    progress.stage(task.name, len(task.prompts) * task.samples, (len(task.prompts) - len(waiting)) * task.samples)
    size = max(1, CHUNK_ROLLOUTS // task.samples)
    for start in range(0, len(waiting), size):
        chunk = replace(task, prompts=waiting[start : start + size])
        # The noise depends on seed, problem, sample and position alone: the same for every model, chunk and re-run.
        evaluation = evaluate(
            chunk,
            lambda prompts: sampler.sample(prompts, seed=seed, step=0, samples=task.samples),
            tokenizer,
            samples=task.samples,
        )
        folder.add(task, evaluation, done)
        progress.advance(len(evaluation.rollouts), sum(len(rollout) for rollout in evaluation.rollouts))
    return folder.finish(task, task.samples, time.perf_counter() - began)


def _as_asked(task: Task, request: Request) -> Task:
    temperature = task.temperature if request.temperature is None else request.temperature
    samples = task.samples if request.samples is None else request.samples
    if temperature == 0:
        samples = 1  # greedy answers are all the same
    return replace(task, samples=samples, temperature=temperature, max_tokens=request.max_tokens or task.max_tokens)


def _local_engine(request: Request, tokenizer: Any) -> Callable[[Task], Sampler]:
    model = load_model(request.model, dtype=request.dtype, device=request.device, trust_remote_code=request.trust_remote_code)
    stops = stop_ids(tokenizer, model)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def sampler(task: Task) -> Sampler:
        settings = SamplingSettings(task.max_tokens, task.temperature, request.top_p, request.top_k, stops)
        return LocalSampler(model, settings, pad_id=pad_id, vocab_size=len(tokenizer))

    return sampler


def _about(request: Request) -> dict[str, Any]:
    settings = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "thinking": request.thinking,
        "chat": request.chat,
        "dtype": request.dtype,
        "engine": "local",
    }
    return {
        "model": request.model,
        "weights": weights_fingerprint(request.model),
        **(request.label or {}),
        "settings": settings,
    }

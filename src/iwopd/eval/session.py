"""`iwopd eval`: evaluate a model on tasks into a folder, in chunks, so that a crash loses little and progress is shown."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from iwopd.data.chat import WITHOUT_THINKING, Rendering
from iwopd.errors import UserError
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.folder import EvaluationFolder
from iwopd.eval.runner import evaluate
from iwopd.eval.task import Task
from iwopd.model_facts import output_rows, pad_id, text_config
from iwopd.models import end_ids, load_configs, load_model, load_tokenizer, weights_fingerprint
from iwopd.rollout.engine import ENGINES, LOCAL, EngineChoice, Student
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rope import fix_rope
from iwopd.runs.owner import owned
from iwopd.section import outcome_settings
from iwopd.stages import StageListener
from iwopd.types import Prompt, Rollout

log = logging.getLogger(__name__)
CHUNK_ROLLOUTS = 256
"""Rollouts that are sampled and checked before they are written; a crash can lose this many."""


class RequestError(UserError, ValueError):
    """Invalid or contradictory options."""


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how; None means the task's own protocol."""

    model: str
    tasks: Sequence[str]
    samples: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int = 0
    limit: int | None = None
    rendering: Rendering = WITHOUT_THINKING
    chat: bool = True
    data: Mapping[str, Path] | None = None
    dtype: str = "float32"
    device: str = "cpu"
    trust_remote_code: bool = False
    unsafe: bool = False
    engine: EngineChoice = LOCAL
    label: Mapping[str, Any] | None = None
    """`method`, `student` and `train_seed`, for tables."""

    def __post_init__(self) -> None:
        least = {"samples": 1, "limit": 1, "max_tokens": 1, "temperature": 0, "top_k": 0, "seed": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and not (value >= lowest and math.isfinite(value)):
                hint = {"temperature": " (0 is greedy)", "top_k": " (0 switches it off)"}.get(name, "")
                raise RequestError(f"--{name.replace('_', '-')} must be at least {lowest}{hint}, got {value}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"--top-p must be above 0 and at most 1 (which switches it off), got {self.top_p}")
        if twice := [name for place, name in enumerate(self.tasks) if name in self.tasks[:place]]:
            raise RequestError(f"--tasks names {twice[0]!r} twice: leave one of them out")
        if not self.tasks:
            raise RequestError("no task is named; see `iwopd eval --help`")
        if (self.top_p < 1 or self.top_k) and not ENGINES[self.engine.name].restricts:
            raise RequestError(
                f"--top-p is {self.top_p} and --top-k {self.top_k}, which the engine {self.engine.name!r} does not take: leave "
                "them out, or use --engine local"
            )
        if unused := sorted(set(self.data or {}) - set(self.tasks)):
            raise RequestError(f"--data names {unused[0]!r}, which is not among the tasks {', '.join(self.tasks)}")


def run_evaluation(request: Request, out: Path, progress: StageListener) -> dict[str, dict[str, Any]]:
    """Evaluate and return the results of every task, as in `eval.json`."""
    specs = [find_task(name) for name in request.tasks]  # wrong names are found before a model is loaded
    progress.stage(f"loading {request.model}", 1)
    tokenizer = load_tokenizer(request.model, trust_remote_code=request.trust_remote_code)
    opening = {"limit": request.limit, "rendering": request.rendering, "chat": request.chat, "unsafe": request.unsafe}
    data = request.data or {}
    tasks = [
        _as_asked(load_task(spec, tokenizer, data=data.get(name), **opening), request)
        for name, spec in zip(request.tasks, specs, strict=True)
    ]
    with owned(out, log.warning):
        folder = EvaluationFolder(out, _about(request))
        student, stops = _student(request, tokenizer, tasks)
        progress.advance(1)
        return _run_tasks(request, tasks, student, stops, tokenizer, folder, progress)


def _run_tasks(
    request: Request,
    tasks: Sequence[Task],
    student: Student,
    stops: frozenset[int],
    tokenizer: Any,
    folder: EvaluationFolder,
    progress: StageListener,
) -> dict[str, dict[str, Any]]:
    with ExitStack() as stack:
        engine = stack.enter_context(request.engine.open(student))
        if engine.folder is not None:
            stack.enter_context(owned(engine.folder, log.warning, "name another one with --engine-option weights_folder=..."))
        results = {}
        for task in tasks:
            settings = SamplingSettings(task.max_tokens, task.temperature, request.top_p, request.top_k, stops)
            results[task.name] = run_task(task, engine.sampler(settings), tokenizer, folder, request.seed, progress)
    return results


def run_task(
    task: Task, sampler: Sampler, tokenizer: Any, folder: EvaluationFolder, seed: int, progress: StageListener
) -> dict[str, Any]:
    """Sample and check the missing samples of a task, chunk by chunk."""

    def sample(prompts: Sequence[Prompt]) -> list[Rollout]:
        # The noise depends on seed, problem, sample and position alone: the same for every model, chunk and re-run.
        return sampler.sample(prompts, seed=seed, step=0, samples=task.samples)

    began = time.perf_counter()
    done = folder.samples(task)
    waiting = [p for p in task.prompts if any((p.id, sample) not in done for sample in range(task.samples))]
    progress.stage(task.name, len(task.prompts) * task.samples, (len(task.prompts) - len(waiting)) * task.samples)
    sampler.progress = progress.advance  # inside a chunk, too: it may take minutes
    size = max(1, CHUNK_ROLLOUTS // task.samples)
    for start in range(0, len(waiting), size):
        chunk = replace(task, prompts=waiting[start : start + size])
        evaluation = evaluate(chunk, sample, tokenizer, samples=task.samples)
        folder.add(task, evaluation, done)
    return folder.finish(task, task.samples, time.perf_counter() - began)


def _as_asked(task: Task, request: Request) -> Task:
    temperature = task.temperature if request.temperature is None else request.temperature
    samples = 1 if temperature == 0 else request.samples or task.samples  # greedy answers are all the same
    return replace(task, samples=samples, temperature=temperature, max_tokens=request.max_tokens or task.max_tokens)


def _student(request: Request, tokenizer: Any, tasks: Sequence[Task]) -> tuple[Student, frozenset[int]]:
    """The model as an engine wants it, and the ids that end an answer. It is not loaded if the engine has it elsewhere."""
    trust = request.trust_remote_code
    longest = max(len(prompt.token_ids) + task.max_tokens for task in tasks for prompt in task.prompts)

    @cache
    def load() -> Any:
        model = load_model(request.model, dtype=request.dtype, device=request.device, trust_remote_code=trust)
        fix_rope(model, longest)
        return model

    if ENGINES[request.engine.name].weights == "elsewhere":
        config, generation = load_configs(request.model, trust_remote_code=trust)
        rows = int(text_config(config).vocab_size)
    else:
        generation, rows = load().generation_config, output_rows(load())
    student = Student(
        load,
        vocab_size=len(tokenizer),
        rows=rows,
        pad_id=pad_id(tokenizer),
        longest=longest,
        dtype=request.dtype,
        seed=request.seed,
    )
    return student, end_ids(tokenizer, generation)


def _about(request: Request) -> dict[str, Any]:
    recorded = ("temperature", "top_p", "top_k", "max_tokens", "seed", "chat", "dtype")
    settings = {name: getattr(request, name) for name in recorded} | {"engine": request.engine.name}
    settings |= request.rendering.outcome()
    if options := outcome_settings(request.engine.settings):
        settings["engine_options"] = options
    weights = weights_fingerprint(request.model)
    return {"model": request.model, "weights": weights, **(request.label or {}), "settings": settings}

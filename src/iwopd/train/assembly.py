"""From settings to the parts of a run: models, prompts, sampler, scorers, learner, task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from iwopd import tiny
from iwopd.adapters import adapter_off
from iwopd.config import Config, ConfigError
from iwopd.data.prompts import PromptOrder, load_prompts
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.task import Task, one_by_one
from iwopd.lm import ResponseModel
from iwopd.models import load_tokenizer, stop_ids
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.learner import Learner
from iwopd.train.loading import load_reference, load_student, load_teacher, open_world, reference_source, source_of
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt, Rollout
from iwopd.vocabulary import check_vocabulary

Notify = Callable[[str], None]


@dataclass
class Parts:
    """What the loop works with."""

    tokenizer: Any
    student: Any
    order: PromptOrder
    sampler: Sampler
    eval_samplers: dict[str, Sampler]
    """By task."""
    student_scorer: LocalScorer
    teacher_scorer: Scorer
    reference_scorer: Scorer | None
    learner: Learner
    tasks: list[Task]
    ranks: Ranks
    device: torch.device
    max_response: int
    """Most tokens of a rollout."""

    def write(self, prompts: Sequence[Prompt], seed: int, step: int, samples: int) -> list[Rollout]:
        """Rollouts of all prompts, each rank writing its share."""
        return self.ranks.share(prompts, lambda mine: self.sampler.sample(mine, seed=seed, step=step, samples=samples))


def assemble(config: Config, notify: Notify, progress: tiny.Progress | None = None) -> Parts:
    """Load or train the models and build everything from them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    accelerator = Accelerator(mixed_precision=config.precision)
    set_seed(config.seed)
    world = open_world(config, progress)
    tokenizer, student, teacher = _models(config, world, accelerator.device)
    vocab_size = len(tokenizer)
    order = prompt_order(config, world, tokenizer, notify)
    stops = stop_ids(tokenizer, student) | frozenset(tokenizer.convert_tokens_to_ids(config.rollout.stop_tokens))
    max_tokens = config.rollout.max_tokens or (world.max_response_tokens if world else 0)
    if not max_tokens:
        raise ConfigError("rollout.max_tokens is needed when no embedded world says how long answers are")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    tasks = _tasks(config, world, tokenizer, max_tokens)

    def sampler(limit: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> LocalSampler:
        settings = SamplingSettings(limit, temperature, top_p, top_k, stops)
        return LocalSampler(student, settings, pad_id=pad_id, vocab_size=vocab_size)

    def scorer(model: Any, **options: Any) -> LocalScorer:
        return LocalScorer(model, temperature=config.rollout.temperature, vocab_size=vocab_size, **options)

    reference_scorer = _reference_scorer(config, world, tokenizer, student, scorer, accelerator.device)
    ranks = Ranks()
    lm = ResponseModel(student, temperature=config.rollout.temperature, vocab_size=vocab_size)
    return Parts(
        tokenizer=tokenizer,
        student=student,
        order=order,
        sampler=sampler(max_tokens, config.rollout.temperature, config.rollout.top_p, config.rollout.top_k),
        eval_samplers={task.name: sampler(task.max_tokens, task.temperature) for task in tasks},
        student_scorer=scorer(student, autocast=accelerator.autocast),
        teacher_scorer=scorer(teacher),
        reference_scorer=reference_scorer,
        learner=Learner(lm, config.optim, config.method, accelerator, ranks),
        tasks=tasks,
        ranks=ranks,
        device=accelerator.device,
        max_response=max_tokens,
    )


def _models(config: Config, world: tiny.World | None, device: torch.device) -> tuple[Any, Any, Any]:
    sources = {name: source_of(config, name, world) for name in ("student", "teacher")}
    student_source, teacher_source = sources["student"], sources["teacher"]
    assert student_source is not None  # the config was validated
    assert teacher_source is not None
    trust = config.models.trust_remote_code
    tokenizer = world.tokenizer if world is not None else load_tokenizer(student_source, trust_remote_code=trust)
    student = load_student(config, student_source, device)
    teacher = load_teacher(config, teacher_source, device)
    for name, model in (("student", student), ("teacher", teacher)):
        check_vocabulary(name, model, tokenizer)
    return tokenizer, student, teacher


def _reference_scorer(config: Config, world: tiny.World | None, tokenizer: Any, student: Any, scorer: Any, device: Any) -> Any:
    """Scores under the reference, where the method needs one: a model of its own, or the student without its adapter."""
    if not config.method.needs_reference:
        return None
    source = reference_source(config, world)
    if source is None:
        return scorer(student, autocast=lambda: adapter_off(student))
    model = load_reference(config, source, device)
    check_vocabulary("reference", model, tokenizer)
    return scorer(model)


def prompt_order(config: Config, world: tiny.World | None, tokenizer: Any, notify: Notify) -> PromptOrder:
    """Which prompts each step gets, from the world or the file."""
    per_step = config.rollout.prompts_per_step
    if world is not None:
        return PromptOrder(world.prompts(config.data.train_size), per_step, config.seed)
    loaded = load_prompts(Path(str(config.data.prompts)), tokenizer, config.data.max_prompt_tokens)
    if loaded.too_long:
        notify(f"{loaded.too_long} prompts have more than {config.data.max_prompt_tokens} tokens and are left out")
    return PromptOrder(loaded.prompts, per_step, config.seed)


def all_prompts(order: Any) -> list[Prompt]:
    """Every prompt that an order draws from; one that mixes several has `orders`."""
    return [prompt for part in getattr(order, "orders", [order]) for prompt in part.prompts]


def _tasks(config: Config, world: tiny.World | None, tokenizer: Any, max_tokens: int) -> list[Task]:
    """What is evaluated in training: the named tasks, or the world's own."""
    settings = config.eval
    if not settings.prompts:
        tasks = []
    elif world is not None and not settings.tasks:
        tasks = [Task("tiny", world.eval_prompts(settings.prompts), one_by_one(world.check))]
    else:
        files = {name: Path(path) for name, path in settings.data.items()}
        tasks = [load_task(find_task(name), tokenizer, data=files.get(name), limit=settings.prompts) for name in settings.tasks]
    names = [task.name for task in tasks]
    if config.checkpoint.best is not None and config.checkpoint.best not in names:
        raise ConfigError(f"checkpoint.best is {config.checkpoint.best!r}, but the evaluated tasks are {names}")
    limit = settings.max_tokens or max_tokens
    samples = settings.samples if settings.temperature else 1
    return [replace(task, samples=samples, temperature=settings.temperature, max_tokens=limit) for task in tasks]

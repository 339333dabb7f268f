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
from iwopd.config import Config, ConfigError
from iwopd.data.prompts import PromptOrder, load_prompts
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.task import Task, one_by_one
from iwopd.lm import ResponseModel
from iwopd.models import check_same_tokenizer, check_vocabulary, load_model, load_tokenizer, stop_ids
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.engines import open_engine
from iwopd.train.learner import Learner
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt, Rollout

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
    close_engine: Callable[[], None]
    """Ends the engine that the samplers share."""

    def write(self, prompts: Sequence[Prompt], seed: int, step: int, samples: int) -> list[Rollout]:
        """Rollouts of all prompts, each rank writing its share."""
        return self.ranks.share(prompts, lambda mine: self.sampler.sample(mine, seed=seed, step=step, samples=samples))


def assemble(config: Config, notify: Notify, progress: tiny.Progress | None = None) -> Parts:
    """Load or train the models and build everything from them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    accelerator = Accelerator(mixed_precision=config.precision)
    set_seed(config.seed)
    world = _world(config, progress)
    tokenizer, student, teacher = _models(config, world, accelerator.device)
    vocab_size = len(tokenizer)
    prompts = _prompts(config, world, tokenizer, notify)
    stops = stop_ids(tokenizer, student)
    max_tokens = config.rollout.max_tokens or (world.max_response_tokens if world else 0)
    if not max_tokens:
        raise ConfigError("rollout.max_tokens is needed when no embedded world says how long answers are")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    tasks = _tasks(config, world, tokenizer, max_tokens)

    ranks = Ranks()
    in_tasks = [len(prompt.token_ids) + task.max_tokens for task in tasks for prompt in task.prompts]
    context = max([config.data.max_prompt_tokens + max_tokens, *in_tasks])
    make_sampler, close_engine = open_engine(
        config, student, context=context, pad_id=pad_id, vocab_size=vocab_size, ranks=ranks
    )

    def sampler(limit: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampler:
        return make_sampler(SamplingSettings(limit, temperature, top_p, top_k, stops))

    def scorer(model: Any, **options: Any) -> LocalScorer:
        return LocalScorer(model, temperature=config.rollout.temperature, vocab_size=vocab_size, **options)

    reference = _reference(config, world, tokenizer, accelerator.device) if config.method.needs_reference else None
    lm = ResponseModel(student, temperature=config.rollout.temperature, vocab_size=vocab_size)
    return Parts(
        tokenizer=tokenizer,
        student=student,
        order=PromptOrder(prompts, config.rollout.prompts_per_step, config.seed),
        sampler=sampler(max_tokens, config.rollout.temperature, config.rollout.top_p, config.rollout.top_k),
        eval_samplers={task.name: sampler(task.max_tokens, task.temperature) for task in tasks},
        student_scorer=scorer(student, autocast=accelerator.autocast),
        teacher_scorer=scorer(teacher),
        reference_scorer=None if reference is None else scorer(reference),
        learner=Learner(lm, config.optim, config.method, accelerator, ranks),
        tasks=tasks,
        ranks=ranks,
        device=accelerator.device,
        close_engine=close_engine,
    )


def _world(config: Config, progress: tiny.Progress | None) -> tiny.World | None:
    models = config.models
    if models.world is None:
        return None
    chosen = {"teacher": models.teacher_size, "student": models.student_size}
    sizes = {name: size for name, size in chosen.items() if size is not None}
    try:
        recipe = tiny.world_recipe(models.world, lineage=models.lineage, **sizes)
    except ValueError as error:
        raise ConfigError(f"models.world: {error}") from None
    return tiny.open_world(recipe, progress=progress)


def _load(config: Config, source: str | Path, device: torch.device) -> Any:
    models = config.models
    return load_model(source, dtype=models.dtype, device=device, trust_remote_code=models.trust_remote_code)


def _models(config: Config, world: tiny.World | None, device: torch.device) -> tuple[Any, Any, Any]:
    if world is not None:
        return world.tokenizer, _load(config, world.student, device), _load(config, world.teacher, device).eval()
    assert config.models.student is not None  # the config was validated
    assert config.models.teacher is not None
    tokenizer = load_tokenizer(config.models.student, trust_remote_code=config.models.trust_remote_code)
    student = _load(config, config.models.student, device)
    teacher = _load(config, config.models.teacher, device).eval()
    for name, model in (("student", student), ("teacher", teacher)):
        check_vocabulary(name, model, tokenizer)
    check_same_tokenizer(tokenizer, config.models.teacher, trust_remote_code=config.models.trust_remote_code)
    return tokenizer, student, teacher


def _reference(config: Config, world: tiny.World | None, tokenizer: Any, device: torch.device) -> Any:
    source = config.models.reference or (world.student if world is not None else config.models.student)
    assert source is not None
    model = _load(config, source, device).eval()
    check_vocabulary("reference", model, tokenizer)
    return model


def _prompts(config: Config, world: tiny.World | None, tokenizer: Any, notify: Notify) -> Sequence[Prompt]:
    if world is not None:
        return world.prompts(config.data.train_size)
    loaded = load_prompts(Path(str(config.data.prompts)), tokenizer, config.data.max_prompt_tokens)
    if loaded.too_long:
        notify(f"{loaded.too_long} prompts have more than {config.data.max_prompt_tokens} tokens and are left out")
    return loaded.prompts


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

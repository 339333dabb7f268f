"""The prompts of a run: those of every training step, and the tasks that it is evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from iwopd import tiny
from iwopd.config import Config, ConfigError
from iwopd.data.prompts import DataError, MixedOrder, PromptOrder, load_prompts
from iwopd.data.sets import LoadedPrompts, load_set, prompt_set
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.task import Task, one_by_one
from iwopd.train.chats import eval_rendering, student_chat

Notify = Callable[[str], None]


def prompt_order(config: Config, world: tiny.World | None, tokenizer: Any, notify: Notify) -> PromptOrder | MixedOrder:
    """Which prompts each step gets, from the world, the one file, or the sets."""
    if world is not None:
        return PromptOrder(world.prompts(config.data.train_size), config.rollout.prompts_per_step, config.seed)
    loaded = training_sets(config, tokenizer)
    for item in loaded:
        if item.too_long or item.filtered or item.duplicates or len(loaded) > 1:
            notify(item.summary(config.data.max_prompt_tokens))
    return order_of(config, loaded)


def order_of(config: Config, loaded: Sequence[LoadedPrompts]) -> PromptOrder | MixedOrder:
    """The order of the prompts of one set, or of several by their weights."""
    per_step = config.rollout.prompts_per_step
    if len(loaded) == 1:
        return PromptOrder(loaded[0].prompts, per_step, config.seed)
    weighted = [(item, given.weight) for item, given in zip(loaded, config.data.sets, strict=True)]
    return MixedOrder(weighted, per_step, config.seed)


def training_sets(config: Config, tokenizer: Any) -> list[LoadedPrompts]:
    """The file of `data.prompts`, or every set of `data.sets`, read and rendered."""
    most, chat = config.data.max_prompt_tokens, student_chat(config, tokenizer)
    if not config.data.sets:
        return [load_prompts(Path(str(config.data.prompts)), chat, most)]
    chosen = [prompt_set(**item.model_dump(exclude_none=True, exclude={"weight"})) for item in config.data.sets]
    names = [item.name for item in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two sets of data.sets are called {twice[0]!r}: give one of them another name")
    if (field := config.rollout.mix.field) is not None:  # parquet files are read column by column
        chosen = [replace(item, keep_fields=[*item.keep_fields, field]) for item in chosen]
    return [load_set(item, chat, most) for item in chosen]


def load_tasks(config: Config, world: tiny.World | None, tokenizer: Any, max_tokens: int) -> list[Task]:
    """What is evaluated in training: the named tasks, or the world's own."""
    settings = config.eval
    unread = [name for name in settings.data if name not in settings.tasks]
    if not settings.prompts:
        tasks = []
    elif unread:
        raise ConfigError(f"eval.data names {unread[0]!r}, which is not among eval.tasks ({', '.join(settings.tasks)})")
    elif world is not None and not settings.tasks:
        tasks = [Task("tiny", world.eval_prompts(settings.prompts), one_by_one(world.check))]
    else:
        files = {name: Path(path) for name, path in settings.data.items()}
        how: dict[str, Any] = {"limit": settings.prompts, "rendering": eval_rendering(config)}
        tasks = [load_task(find_task(name), tokenizer, data=files.get(name), **how) for name in settings.tasks]
    names = [task.name for task in tasks]
    if config.checkpoint.best is not None and config.checkpoint.best not in names:
        raise ConfigError(f"checkpoint.best is {config.checkpoint.best!r}, but the evaluated tasks are {names}")
    limit = settings.max_tokens or max_tokens
    samples = settings.samples if settings.temperature else 1
    return [replace(task, samples=samples, temperature=settings.temperature, max_tokens=limit) for task in tasks]

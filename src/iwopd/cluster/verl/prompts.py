"""The prompts for verl: one parquet file with a row for every prompt of every step, in the order of the local engine.

verl reads it from the first row to the last without shuffling, so step k has the same prompts as on the local engine,
and a resumed run continues at its position in the file. (Within a step verl distributes them over its ranks by length.) verl
renders the messages itself, with the same tokenizer, template and `data.chat_template_kwargs`; some are rendered here, too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from iwopd.cluster.verl.evaluation import label
from iwopd.cluster.verl.reward import TRAINING, written_prompt
from iwopd.cluster.verl.translate import AGENT_LOOP, DEFAULT_TEACHER, Places, answer_limit, is_limited, model_path
from iwopd.config import Config
from iwopd.data.fields import DataError
from iwopd.data.prompts import MixedOrder, PromptOrder
from iwopd.eval.task import Task
from iwopd.models import load_configs, load_tokenizer
from iwopd.train.chats import student_chat
from iwopd.train.loading import planned_world, source_of
from iwopd.train.prompts import prompt_order
from iwopd.types import Prompt

TRIED = 256
"""Prompts whose ids are compared with verl's rendering of their messages."""
STEPS_AT_ONCE = 16
"""Steps that are in memory while the file is written."""


def load_order(config: Config, notify: Callable[[str], None]) -> tuple[PromptOrder | MixedOrder, Any]:
    """The order of prompts and the student's tokenizer; needs no weights."""
    world = planned_world(config)
    if world is not None:
        return prompt_order(config, world, world.tokenizer, notify), world.tokenizer
    source = source_of(config, "student")
    assert source is not None  # the config was validated
    tokenizer = load_tokenizer(source, trust_remote_code=config.models.trust_remote_code)
    return prompt_order(config, None, tokenizer, notify), tokenizer


def write_prompts(
    config: Config, order: PromptOrder | MixedOrder, tokenizer: Any, where: Places, tasks: Sequence[Task] = ()
) -> None:
    """Write the prompts of all steps, and the problems of the evaluated tasks."""
    known = {DEFAULT_TEACHER, *config.teacher.others}
    problems = [prompt for task in tasks for prompt in task.prompts]
    chat = student_chat(config, tokenizer)
    for prompt in [*order.prompts[:TRIED], *problems[:TRIED]]:
        ids = chat.render(messages(prompt)).token_ids
        if ids != prompt.token_ids:
            here = f"{len(prompt.token_ids)} ids here"
            raise DataError(f"prompt {prompt.id!r} has {here} and {len(ids)} when its messages are rendered alone")
    where.folder.mkdir(parents=True, exist_ok=True)
    if config.data.chat_template is not None:
        _save_tokenizer(config, tokenizer, where.tokenizer)
    _write(where.train_file, _steps(config, order, known))
    rows = [_row(prompt, 0, 0, known, task=task) for task in tasks for prompt in task.prompts]
    _write(where.val_file, iter([rows or [_row(order.batch(1)[0], 1, 0, known)]]))
    if is_limited(config):
        where.agent_loops.write_text(f"- name: {AGENT_LOOP}\n  _target_: iwopd.cluster.verl.agent_loop.LimitedAgentLoop\n")


def _save_tokenizer(config: Config, tokenizer: Any, folder: Path) -> None:
    """The student's tokenizer with the recipe's chat template: verl renders by what the tokenizer says."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = config.data.chat_template
    tokenizer.save_pretrained(folder)
    found, _ = load_configs(model_path(config, "student"), trust_remote_code=config.models.trust_remote_code)
    found.save_pretrained(folder)  # verl asks there for the kind of model


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """A prompt's messages as plain role and content."""
    if "expression" in prompt.metadata:  # of an embedded world
        return [{"role": "user", "content": str(prompt.metadata["expression"])}]
    given = prompt.metadata.get("messages") or []
    for message in given:
        if set(message) != {"role", "content"} or not isinstance(message["content"], str):
            raise DataError(
                f"prompt {prompt.id!r} has a message with {sorted(message)}: verl is given messages of role and text only; "
                "leave the others out, or use the local engine"
            )
    if not given:
        raise DataError(f"prompt {prompt.id!r} is not a chat, and verl renders chats")
    return [dict(message) for message in given]


def _steps(config: Config, order: PromptOrder | MixedOrder, known: set[str]) -> Iterator[list[dict[str, Any]]]:
    def truth(prompt: Prompt) -> str:
        return "" if config.reward.checker is None else written_prompt(prompt)

    for first in range(1, config.steps + 1, STEPS_AT_ONCE):
        steps = range(first, min(first + STEPS_AT_ONCE, config.steps + 1))
        yield [
            _row(prompt, step, place, known, limit=answer_limit(config, step) if is_limited(config) else 0, truth=truth(prompt))
            for step in steps
            for place, prompt in enumerate(order.batch(step))
        ]


def _row(
    prompt: Prompt, step: int, place: int, known: set[str], *, limit: int = 0, truth: str = "", task: Task | None = None
) -> dict[str, Any]:
    """`limit`: most tokens of its answer; 0: verl's own. `truth`: what a checker must know."""
    teacher = prompt.teacher or DEFAULT_TEACHER
    if teacher not in known:
        raise DataError(f"prompt {prompt.id!r} names the teacher {teacher!r}; there are {sorted(known)} (teacher.others)")
    return {
        "prompt": messages(prompt),
        "data_source": task.name if task else TRAINING,
        "teacher": teacher,
        "reward_model": {"style": "rule", "ground_truth": label(task, prompt) if task else truth},
        "extra_info": {"index": place, "id": prompt.id, "step": step, "limit": limit},
    }


def _write(path: Path, parts: Iterator[list[dict[str, Any]]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number = pa.string(), pa.int64()
    schema = pa.schema(
        {
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "data_source": text,
            "teacher": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct({"index": number, "id": text, "step": number, "limit": number}),
        }
    )
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with pq.ParquetWriter(draft, schema) as writer:
            for rows in parts:
                writer.write_table(pa.Table.from_pylist(rows, schema))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

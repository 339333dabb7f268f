"""Rendered prompts of a run to look at: what the doctor shows, and what the run directory keeps (`prompts.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iwopd.config import Config
from iwopd.filesystem import write_atomic
from iwopd.train.chats import seen_by_teacher, student_chat
from iwopd.types import Prompt

COUNT = 3
FILE = "prompts.json"
NONE: Mapping[str, Any] = {}


def rendered_examples(
    config: Config, tokenizer: Any, prompts: Sequence[Prompt], foreign: Mapping[str, Any] = NONE
) -> list[dict[str, Any]]:
    """The first few prompts with their texts and numbers of ids; the teacher's, too, where it sees another one.

    `foreign`: tokenizers of teachers whose ids mean something else, by section.
    """
    found: list[dict[str, Any]] = []
    for prompt in prompts[:COUNT]:
        found.append({"id": prompt.id, **_shown(prompt)})
        if (seen := seen_by_teacher(config, tokenizer, prompt, foreign)) is not None:
            found[-1]["teacher"] = _shown(seen)
    return found


def keep_examples(
    folder: Path, config: Config, tokenizer: Any, prompts: Sequence[Prompt], foreign: Mapping[str, Any] = NONE
) -> None:
    """Write them into the run directory, with the template that made them; a resumed run keeps what it began with."""
    if (folder / FILE).exists():
        return
    about: Mapping[str, Any] = {}
    if config.models.world is None:
        chat = student_chat(config, tokenizer)
        about = {"chat_template": chat.own_template, "chat_template_kwargs": dict(chat.kwargs), "prefill": chat.prefill}
    whole = {**about, "examples": rendered_examples(config, tokenizer, prompts, foreign)}
    write_atomic(folder / FILE, json.dumps(whole, indent=2, ensure_ascii=False, default=str) + "\n")


def _shown(prompt: Prompt) -> dict[str, Any]:
    return {"text": prompt.text, "ids": len(prompt.token_ids)}

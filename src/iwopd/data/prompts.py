"""Prompt sources and their order: a JSONL file for any model, and the same order for every method and after every resume.

Schema of a line: `{"id": …, "prompt": … or "messages": […], "answer": …, "teacher": …}`; `id` defaults to the line's
number, `answer` and `teacher` may be absent. `prompt` becomes one user message.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iwopd.data.chat import ChatError, render
from iwopd.errors import UserError
from iwopd.types import Prompt


class DataError(UserError, ValueError):
    """A data file that cannot be used, with the line and the field."""


@dataclass(frozen=True)
class LoadedPrompts:
    prompts: list[Prompt]
    too_long: int
    """Left out because they have more tokens than allowed."""


def load_prompts(path: Path, tokenizer: Any, max_tokens: int) -> LoadedPrompts:
    """Read a JSONL file and render it with the tokenizer's chat template, thinking off; over-long prompts are left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand inside a JSON string
    except OSError as error:
        raise DataError(f"cannot read prompts from {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from None
    prompts, too_long = [], 0
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{path}, line {number}", str(number), tokenizer)
        if prompt.id in seen:
            raise DataError(f"{path}, line {number}: the id {prompt.id!r} occurs twice")
        seen.add(prompt.id)
        if len(prompt.token_ids) > max_tokens:
            too_long += 1
        else:
            prompts.append(prompt)
    if not prompts:
        why = f"all {too_long} are longer than {max_tokens} tokens" if too_long else "it has no lines"
        raise DataError(f"{path} has no usable prompts: {why}")
    return LoadedPrompts(prompts, too_long)


def _prompt(line: str, where: str, default_id: str, tokenizer: Any) -> Prompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected an object, got {type(item).__name__}")
    messages = item.get("messages")
    if messages is None:
        if not isinstance(item.get("prompt"), str):
            raise DataError(f"{where}: needs a string 'prompt' or a list 'messages'; it has {sorted(item)}")
        messages = [{"role": "user", "content": item["prompt"]}]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise DataError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    try:
        text, ids = render(tokenizer, messages)
    except ChatError as error:
        raise DataError(f"{where}: {error}") from None
    answer = item.get("answer")
    return Prompt(
        id=str(item.get("id", default_id)),
        token_ids=ids,
        text=text,
        answer=None if answer is None else str(answer),
        teacher=item.get("teacher"),
        metadata={**item, "messages": messages},
    )


class PromptOrder:
    """Which prompts each step gets: epoch after epoch in a shuffled order that depends on the seed and the epoch alone.

    A step never crosses the end of an epoch, so no prompt occurs twice in it; what does not fill a step waits for the next
    epoch's shuffle.
    """

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int) -> None:
        if len(prompts) < per_step:
            raise DataError(f"there are {len(prompts)} training prompts, fewer than the {per_step} of one step")
        self.prompts = list(prompts)
        self.per_step = per_step
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return len(self.prompts) // self.per_step

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = list(range(len(self.prompts)))
        random.Random(f"order:{self.seed}:{epoch}").shuffle(order)
        return [self.prompts[row] for row in order[place * self.per_step : (place + 1) * self.per_step]]

    def fingerprint(self) -> str:
        """Hash of all prompts in their given order: tells whether a resumed run has the same data."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(repr((prompt.id, prompt.token_ids)).encode())
        return digest.hexdigest()[:16]

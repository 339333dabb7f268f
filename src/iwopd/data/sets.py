"""Sets of training prompts: any JSONL or parquet files with a field mapping, and the paper's two by name.

Each record is filtered, rendered as a chat, and left out if it has too many tokens or,
with `unique`, occurred before. Nothing is truncated, everything left out is counted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from iwopd.data.chat import Chat, ChatError
from iwopd.data.fields import DataError, lookup, parse_filter
from iwopd.data.sources import HUB, data_files, local_copy, records
from iwopd.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    """Where prompts come from and what their fields are called."""

    source: str
    """A JSONL or parquet file, a folder of them, or `hub:org/name`."""
    name: str = ""
    """Prefix of the ids of its prompts; empty: no prefix."""
    files: str | None = None
    """Pattern of the files of a folder or hub set; None: its training split."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None: main."""
    prompt_field: str = "prompt"
    """A text (it becomes one user message), or a list of messages. Dots descend into nested records, here and below."""
    messages_field: str = "messages"
    """A list of messages with role and content; preferred to the prompt if a record has both."""
    answer_field: str = "answer"
    """Empty: not read."""
    id_field: str = "id"
    """Records without it are numbered from 1, over all files."""
    teacher_field: str = "teacher"
    teacher: str | None = None
    """The teacher of prompts that do not name one."""
    keep_fields: Sequence[str] = ()
    """Further columns of a parquet file to keep in `Prompt.metadata`; JSONL records are kept whole."""
    filter: str = ""
    """See `data.fields.parse_filter`; empty: all."""
    suffix: str = ""
    """Appended to the last user message."""
    drop_system: bool = False
    """Leave system messages out."""
    unique: bool = False
    """Leave out exact duplicates of earlier prompts."""


NAMED: Mapping[str, PromptSet] = {
    "deepmath": PromptSet(
        "hub:zwhe99/DeepMath-103K",
        "deepmath",
        files="data/train-*.parquet",
        revision="5cf055d1fe3d7a2eb19719ac020211469736ae44",
        prompt_field="question",
        answer_field="final_answer",
        filter="difficulty >= 6",
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
        unique=True,
    ),
    "eurus-code": PromptSet(
        "hub:PRIME-RL/Eurus-2-RL-Data",
        "eurus-code",
        files="train.parquet",
        revision="9776b13264b5aaa0b16495fcf086a0a8d86fd655",
        answer_field="",  # test cases: gigabytes that training does not need
        filter="ability == 'code'",
        suffix="\nYou need to think first then write the Python code.",
        drop_system=True,
    ),
}
"""The paper's training sets; docs/data.md says what was verified."""


@dataclass(frozen=True)
class LoadedPrompts:
    prompts: list[Prompt]
    too_long: int
    """Left out because they have more tokens than allowed."""
    filtered: int = 0
    """Left out by the filter."""
    duplicates: int = 0
    """Left out because they occurred before."""
    name: str = ""

    def summary(self, max_tokens: int) -> str:
        """Counts of prompts kept and left out, in one line."""
        reasons = {
            "left out by its filter": self.filtered,
            "left out as duplicates": self.duplicates,
            f"left out with more than {max_tokens} tokens": self.too_long,
        }
        counts = [f"{len(self.prompts)} prompts", *(f"{count} {why}" for why, count in reasons.items() if count)]
        return f"{self.name or 'data'}: {', '.join(counts)}"


def prompt_set(source: str, **given: Any) -> PromptSet:
    """A named set or the user's own; given fields override those of a named set.

    A copy in the folder IWOPD_DATA is used instead of the hub: `deepmath.parquet` or `deepmath.jsonl`.
    """
    if (named := NAMED.get(source)) is not None:
        copy = local_copy(f"{named.name}.parquet") or local_copy(f"{named.name}.jsonl")
        place = {} if copy is None else {"source": str(copy.path), "files": None, "revision": None}
        return replace(named, **{**place, **given})
    near = difflib.get_close_matches(source, NAMED, n=1, cutoff=0.75)
    if near and not Path(source).exists():
        raise DataError(f"unknown set {source!r}; did you mean {near[0]!r}? Others are files, folders or {HUB}org/name")
    stem = source.rstrip("/").rpartition("/")[2]
    name = stem if source.startswith(HUB) or Path(source).is_dir() else stem.rpartition(".")[0] or stem
    return PromptSet(source, **{"name": name, **given})


def load_set(chosen: PromptSet, chat: Chat, max_tokens: int) -> LoadedPrompts:
    """Read, filter and render a set."""
    conditions = parse_filter(chosen.filter) if chosen.filter else ()
    prompts: list[Prompt] = []
    too_long = filtered = duplicates = 0
    ids: set[str] = set()
    texts: set[tuple[int, ...]] = set()
    for number, (where, item) in enumerate(_records(chosen, [c.field for c in conditions]), start=1):
        if not all(condition.holds(item, where) for condition in conditions):
            filtered += 1
            continue
        prompt = _prompt(item, where, number, chosen, chat)
        if prompt.id in ids:
            raise DataError(f"{where}: the id {prompt.id!r} occurs twice")
        ids.add(prompt.id)
        if len(prompt.token_ids) > max_tokens:
            too_long += 1
        elif chosen.unique and prompt.token_ids in texts:
            duplicates += 1
        else:
            texts.add(prompt.token_ids)
            prompts.append(prompt)
    if not prompts:
        none_meets = f"none of {filtered} records meets {chosen.filter!r}" if filtered else "it has no lines"
        why = f"all {too_long} are longer than {max_tokens} tokens" if too_long else none_meets
        raise DataError(f"{chosen.source} has no usable prompts: {why}")
    return LoadedPrompts(prompts, too_long, filtered, duplicates, chosen.name)


def _records(chosen: PromptSet, filter_fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [value for field in fields(chosen) if field.name.endswith("_field") and (value := getattr(chosen, field.name))]
    columns = [*names, *filter_fields, *chosen.keep_fields]
    columns += [name.partition(".")[0] for name in columns if "." in name]
    for path in data_files(chosen.source, chosen.files, chosen.revision):
        yield from records(path, columns, needed=(chosen.prompt_field, chosen.messages_field))


def _prompt(item: Mapping[str, Any], where: str, number: int, chosen: PromptSet, chat: Chat) -> Prompt:
    messages = _messages(item, where, chosen)
    try:
        text, token_ids = chat.render(messages)
    except ChatError as error:
        raise DataError(f"{where}: {error}") from None
    id_ = lookup(item, chosen.id_field)
    id_ = str(number if id_ is None else id_)
    answer = lookup(item, chosen.answer_field) if chosen.answer_field else None
    teacher = lookup(item, chosen.teacher_field)
    if teacher is not None and not isinstance(teacher, str):
        raise DataError(f"{where}: {chosen.teacher_field!r} must be the name of a teacher, got {teacher!r}")
    return Prompt(
        id=f"{chosen.name}/{id_}" if chosen.name else id_,
        token_ids=token_ids,
        text=text,
        begun=chat.begun(text),
        answer=None if answer is None else str(answer),
        teacher=teacher or chosen.teacher,
        metadata={**item, "messages": messages},  # for a teacher's own prompt
    )


def _messages(item: Mapping[str, Any], where: str, chosen: PromptSet) -> list[dict[str, Any]]:
    """The record's messages for the chat template."""
    found, name = lookup(item, chosen.messages_field), chosen.messages_field
    if found is None:
        found, name = lookup(item, chosen.prompt_field), chosen.prompt_field
        if isinstance(found, str):
            found = [{"role": "user", "content": found}]
        elif not isinstance(found, list):
            raise DataError(
                f"{where}: needs a string {chosen.prompt_field!r} or a list {chosen.messages_field!r}; it has {sorted(item)}"
            )
    if not isinstance(found, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in found):
        raise DataError(f"{where}: {name!r} must be a list of objects with 'role' and 'content'")
    # Parquet gives every message all keys that any message has: drop those without a value.
    messages = [{key: value for key, value in message.items() if value is not None} for message in found]
    if chosen.drop_system:
        messages = [message for message in messages if message.get("role") != "system"]
    if chosen.suffix:
        last = next((message for message in reversed(messages) if message.get("role") == "user"), None)
        if last is None or not isinstance(last.get("content"), str):
            raise DataError(f"{where}: there is no user message that the suffix could follow")
        last["content"] += chosen.suffix
    return messages

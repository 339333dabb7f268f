"""A task's problems: where they come from, and how a record becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iwopd import tiny
from iwopd.data.chat import WITHOUT_THINKING, ChatError, Rendering, encode
from iwopd.data.sources import Local, Source, local_copy, records
from iwopd.errors import UserError
from iwopd.types import Prompt


class TaskError(UserError, ValueError):
    """A task that does not exist or whose data does not fit, with the line and the field."""


@dataclass(frozen=True)
class TaskSpec:
    """How to make a task."""

    name: str
    checker: str
    """A name of `eval.checkers.CHECKERS`: math, exact, code, tiny, or a plug-in's."""
    source: Source | None = None
    local_name: str = ""
    """A file of this name in the folder `IWOPD_DATA`, if there is one, comes before the source."""
    problem: str = "problem"
    answer: str = "answer"
    id: str = "id"
    """Names of the fields."""
    answer_after: str = ""
    """The answer is what follows this mark (GSM8K: `####`)."""
    suffix: str = ""
    """Follows every problem."""
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int = 16384
    world: str = tiny.DEFAULT_WORLD


@dataclass(frozen=True)
class Opening:
    """For which model a task is opened, and which of its problems."""

    tokenizer: Any
    data: Path | None = None
    """Instead of the task's own source."""
    limit: int | None = None
    """Only the first ones."""
    rendering: Rendering = WITHOUT_THINKING
    chat: bool = True
    """False: the problem's text itself is the prompt, for base models that have no chat template."""
    unsafe: bool = False
    """Run generated code without a sandbox if none works."""

    def prompt(self, spec: TaskSpec, id_: str, text: str, answer: str | None = None) -> Prompt:
        if not self.chat:
            return Prompt(id_, encode(self.tokenizer, text), text, answer)
        messages = [{"role": "user", "content": text}]
        try:
            chat = self.rendering.of(self.tokenizer)
            text, ids = chat.render(messages)
        except ChatError as error:
            hint = "--no-chat gives a base model the bare text"
            raise TaskError(f"task {spec.name!r}, problem {id_!r}: {error}; {hint}") from None
        return Prompt(id_, ids, text, answer, begun=chat.begun(text), metadata={"messages": messages})


def problem_file(spec: TaskSpec, data: Path | None = None) -> Path:
    """The file with the problems: `data` if it is given, else the user's copy, else the task's source."""
    source = Local(data) if data is not None else local_copy(spec.local_name) or spec.source
    if source is None:
        raise TaskError(f"task {spec.name!r} names no source; give a file with --data {spec.name}=FILE")
    return source.fetch()


def answered_problems(spec: TaskSpec, opening: Opening) -> list[Prompt]:
    """Problems with their answers. Our own field names are understood beside those of the spec."""
    found: list[Prompt] = []
    seen: set[str] = set()
    path = problem_file(spec, opening.data)
    for where, item in records(path):
        if len(found) == opening.limit:
            break
        text = _field(item, (spec.problem, "problem"), where)
        answer = _field(item, (spec.answer, "answer"), where)
        if spec.answer_after:
            answer = answer.rpartition(spec.answer_after)[2]
        if not text.strip() or not answer.strip():
            raise TaskError(f"{where}: {'the problem' if not text.strip() else 'the answer'} is empty")
        id_ = problem_id(spec, item, len(found))
        if id_ in seen:
            raise TaskError(f"{where}: the id {id_!r} occurs twice")
        seen.add(id_)
        found.append(opening.prompt(spec, id_, text + spec.suffix, answer.strip()))
    if not found:
        raise TaskError(f"task {spec.name!r}: {path} has no problems")
    return found


def problem_id(spec: TaskSpec, item: Mapping[str, Any], number: int) -> str:
    return str(item.get(spec.id, item.get("id", f"{spec.name}/{number}")))


def _field(item: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        value = item.get(name)
        if isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return str(value)
    wanted = " or ".join(repr(name) for name in dict.fromkeys(names))
    raise TaskError(f"{where}: needs a string {wanted}; it has the fields {', '.join(sorted(item))}")

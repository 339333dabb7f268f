"""Chat templates: the teacher sees the student's rendered ids, in a format that may not be its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from iwopd.data.chat import Chat, ChatError
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, passed, warning

MESSAGES = [{"role": "user", "content": "1+2"}]
"""Short and plain: every tokenizer can encode it."""
COMPARED = 16
"""Prompts that are also tokenised with the teacher's tokenizer."""
MOST_LINES = 14


def check_template(case: Case) -> Iterator[Finding]:
    """The student has a template; the teacher's own would render the same."""
    student, teacher = case.student.tokenizer, case.teacher.tokenizer
    if student is None or case.config.models.world is not None:
        return
    ours = _render(student)
    if ours is None:
        yield failure(
            "chat template",
            "the student's tokenizer has no chat template that renders a user message, so prompts cannot be rendered",
            "save the tokenizer with one (tokenizer.chat_template), for a base model for instance its teacher's",
        )
        return
    yield from _thinking(student)
    theirs = None if teacher is None else _render(teacher)
    if case.foreign:
        if theirs is None:
            yield failure(
                "chat template",
                "the teacher has another tokenizer and no chat template that renders a user message, so it cannot be asked",
                "give its tokenizer one (chat_template.jinja beside its files), or choose a teacher that was trained on chats",
            )
        else:
            yield passed("chat template", "student and teacher each see prompts in a format of their own")
        return
    if theirs is None:
        lack = "tokenizer" if teacher is None else "chat template"
        message = f"the teacher has no {lack}: it sees the student's rendering"
        yield warning("chat template", message, "make sure that it was trained on chats")
    elif ours != theirs:
        yield warning(
            "chat template",
            "the teacher sees the student's rendering, which is not its own",
            "harmless if the teacher knows the student's format; else give the student the teacher's template",
            _diff(ours, theirs),
        )
    else:
        yield passed("chat template", "student and teacher render a user message alike")
    if teacher is not None:
        yield from _same_ids(case, teacher)


def _thinking(student: Any) -> Iterator[Finding]:
    same = _render(student, thinking=True) == _render(student)
    mode = "no thinking mode" if same else "a thinking mode; prompts are rendered with thinking off"
    yield passed("thinking", f"the student's template has {mode}")


def _same_ids(case: Case, teacher: Any) -> Iterator[Finding]:
    """The teacher's tokenizer splits the same texts into the same ids."""
    for prompt in (prompt for prompt in case.prompts[:COMPARED] if prompt.text):
        theirs = tuple(teacher(prompt.text, add_special_tokens=False)["input_ids"])
        if theirs != prompt.token_ids:
            place = next((i for i, (a, b) in enumerate(zip(prompt.token_ids, theirs, strict=False)) if a != b), len(theirs))
            pieces = [teacher.convert_ids_to_tokens(list(ids[place : place + 6])) for ids in (prompt.token_ids, theirs)]
            yield warning(
                "prompt ids",
                f"the teacher's tokenizer splits prompt {prompt.id!r} differently from token {place} on (same meaning, "
                "other boundaries), so the teacher scores texts that are split unlike its training data",
                "take the tokenizer files of one of them for both",
                _diff(*("\n".join(map(str, some)) for some in pieces)),
            )
            return
    if case.prompts:
        yield passed("prompt ids", "the teacher's tokenizer splits the prompts into the student's ids")


def _render(tokenizer: Any, *, thinking: bool = False) -> str | None:
    try:
        return Chat(tokenizer, kwargs={"enable_thinking": thinking}).text(MESSAGES)
    except ChatError:
        return None


def _diff(ours: str, theirs: str) -> str:
    """A unified diff of quoted lines, which shows blanks at the ends of lines."""
    one, other = ([repr(line) for line in text.splitlines()] for text in (ours, theirs))
    lines = list(difflib.unified_diff(one, other, "student", "teacher", lineterm="", n=1))
    more = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *more])

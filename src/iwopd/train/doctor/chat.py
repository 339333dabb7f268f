"""Chat templates: what they are given, whether student and teacher render alike, and what prompts come out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from iwopd.data.chat import THINKING, Chat, ChatError
from iwopd.data.thinking import TAG
from iwopd.train.chats import EXAMPLE, student_chat, student_rendering, teacher_chat, unrenderable
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, listed, passed, warning
from iwopd.train.examples import rendered_examples
from iwopd.train.tokenizers import TEACHER

COMPARED = 16
"""Prompts that are also tokenised with the teacher's tokenizer."""
MOST_LINES = 14
MOST_LETTERS = 400
"""Of a prompt that is shown; the middle of a longer one is left out."""


def check_template(case: Case) -> Iterator[Finding]:
    """The student's template renders; it knows what it is given; the teacher's own would render the same."""
    config, student, teacher = case.config, case.student.tokenizer, case.teacher.tokenizer
    if student is None or config.models.world is not None:
        return
    try:
        chat = student_chat(config, student)
    except ChatError as error:
        yield failure("chat template", str(error), "correct data.prefill")
        return
    if wrong := dict(unrenderable(config, student)):
        for place, why in wrong.items():
            yield failure("chat template", f"{place}.chat_template renders no user message: {why}", "correct the file")
        return
    ours = _rendered(chat)
    if ours is None:
        yield failure(
            "chat template",
            "the student's tokenizer has no chat template that renders a user message, so prompts cannot be rendered",
            "save the tokenizer with one (tokenizer.chat_template), for a base model for instance its teacher's, or name a "
            "file with one (data.chat_template)",
        )
        return
    yield from _names(case, chat)
    yield from _thinking(case, chat)
    if config.teacher.is_student:
        yield passed("chat template", "the student is its own teacher: both render with one template")
        return
    seen = _rendered(teacher_chat(config, config.teacher, student)) or ours
    own = None if teacher is None else replace(teacher_chat(config, config.teacher, teacher, foreign=True), template=None)
    theirs = None if own is None else _rendered(own)
    if case.foreign:
        if _rendered(teacher_chat(config, config.teacher, teacher, foreign=True)) is None:
            yield failure(
                "chat template",
                "the teacher has another tokenizer and no chat template that renders a user message, so it cannot be asked",
                "name a file with one (teacher.chat_template), or choose a teacher that was trained on chats",
            )
        else:
            yield passed("chat template", "student and teacher each see prompts in a format of their own")
        return
    if theirs is None:
        lack = "tokenizer" if teacher is None else "chat template"
        what = "the student's rendering" if seen == ours else "the rendering that [teacher] describes"
        yield warning("chat template", f"the teacher has no {lack}: it sees {what}", "make sure that it was trained on chats")
    elif seen != theirs:
        what = "the student's rendering" if seen == ours else "the rendering that [teacher] describes"
        yield warning(
            "chat template",
            f"the teacher sees {what}, which is not its own",
            "harmless if the teacher knows that format; else name a file with the teacher's template (teacher.chat_template)",
            _diff(seen, theirs),
        )
    elif seen != ours:
        yield passed("chat template", "the teacher sees its own rendering, which is not the student's")
    else:
        yield passed("chat template", "student and teacher render a user message alike")
    if teacher is not None and case.same_ids:  # else the vocabularies' line has said it, and ids of one are no ids of the other
        yield from _same_ids(case, teacher)


def check_rendering(case: Case) -> Iterator[Finding]:
    """Nothing is judged: a few prompts as the models see them."""
    if case.data_problem:
        return
    try:
        foreign = {TEACHER: case.teacher.tokenizer} if case.foreign else {}
        found = rendered_examples(case.config, case.student.tokenizer, case.prompts, foreign)
    except ChatError as error:
        yield failure("rendering", str(error), "correct [teacher], or leave its prompt out")
        return
    for example in found:
        theirs = f"; the teacher's: {_shown(example['teacher'])}" if "teacher" in example else ""
        yield passed("rendering", f"{example['id']!r}: {_shown(example)}{theirs}")


def _names(case: Case, chat: Chat) -> Iterator[Finding]:
    """Every name that a template is given is one that it asks for."""
    config, tokenizer = case.config, case.student.tokenizer
    teachers = {"teacher": config.teacher, **{f"teacher.others.{name}": one for name, one in config.teacher.others.items()}}
    given: dict[str, tuple[Mapping[str, Any], Chat]] = {
        "data": (config.data.chat_template_kwargs, chat),
        "eval": (config.eval.chat_template_kwargs, chat),
        **{place: (one.chat_template_kwargs, teacher_chat(config, one, tokenizer)) for place, one in teachers.items()},
    }
    if case.foreign:
        own = teacher_chat(config, config.teacher, case.teacher.tokenizer, foreign=True)
        given[TEACHER] = (config.teacher.chat_template_kwargs, own)
    for place, (kwargs, used) in given.items():
        if unknown := [name for name in kwargs if not used.asks_for(name)]:
            knows = f"it knows {listed(sorted(used.known))}" if used.known else "it knows no names"
            yield warning(
                "template names",
                f"{place}.chat_template_kwargs gives {listed(map(repr, unknown))}, which the chat template does not ask for",
                f"{knows}: correct the name, or leave it out",
            )


def _thinking(case: Case, chat: Chat) -> Iterator[Finding]:
    """Whether answers think, and whether `rollout.thinking` goes with it."""
    rendering = student_rendering(case.config)
    on, off = (_rendered(rendering.but({THINKING: value}).of(chat.tokenizer)) for value in (True, False))
    text = _rendered(chat) or ""
    if on != off:
        state = f"a thinking mode; prompts are rendered with thinking {'on' if chat.kwargs.get(THINKING) else 'off'}"
    elif chat.begun(text).removesuffix(chat.prefill):
        state = "no switch for thinking; it opens a thinking block in every answer"
    else:
        state = "no thinking mode"
    choice = case.config.rollout.thinking
    without = state == "no thinking mode" and not chat.has_thinking
    begun = TAG.search(chat.prefill) is not None
    if choice != "keep" and not begun and (without or (on != off and not chat.kwargs.get(THINKING))):
        switch_on = "" if without else ", or data.chat_template_kwargs = {enable_thinking = true}"
        message = f"rollout.thinking is {choice!r}, but the student's template has {state}: answers may have no thinking blocks"
        yield warning("thinking", message, f"set rollout.thinking = 'keep'{switch_on}")
    else:
        yield passed("thinking", f"the student's template has {state}")


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


def _rendered(chat: Chat) -> str | None:
    """A user message as the chat renders it; None: it does not."""
    try:
        return chat.text(EXAMPLE)
    except ChatError:
        return None


def _shown(example: Mapping[str, Any]) -> str:
    text = repr(example["text"])
    if len(text) > MOST_LETTERS:
        half = MOST_LETTERS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} letters] {text[-half:]}"
    return f"{example['ids']:,} ids, {text}"


def _diff(ours: str, theirs: str) -> str:
    """A unified diff of quoted lines, which shows blanks at the ends of lines."""
    one, other = ([repr(line) for line in text.splitlines()] for text in (ours, theirs))
    lines = list(difflib.unified_diff(one, other, "student", "teacher", lineterm="", n=1))
    more = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *more])

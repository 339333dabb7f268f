"""From settings to renderings: how the student's prompts are made, those of evaluations, and those of each teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from iwopd.config import Config, TeacherSource
from iwopd.data.chat import THINKING_OFF, Chat, ChatError, Rendering
from iwopd.data.teacher_view import PromptTemplate, foreign_prompt, teacher_prompt
from iwopd.types import Prompt

EXAMPLE = [{"role": "user", "content": "1+2"}]
"""Short and plain: every tokenizer can encode it."""


def student_rendering(config: Config) -> Rendering:
    """How training prompts are rendered (`[data]`)."""
    data = config.data
    return Rendering(data.chat_template, {**THINKING_OFF, **data.chat_template_kwargs}, data.prefill)


def eval_rendering(config: Config) -> Rendering:
    """How the problems of evaluations are rendered: as in training, but for what `[eval]` says."""
    return student_rendering(config).but(config.eval.chat_template_kwargs)


def student_chat(config: Config, tokenizer: Any) -> Chat:
    """What renders training prompts."""
    return student_rendering(config).of(tokenizer)


def teacher_chat(config: Config, source: TeacherSource, tokenizer: Any, *, foreign: bool = False) -> Chat:
    """What a teacher's prompts are rendered with: as the student's, but for what its own settings say.

    `foreign`: the tokenizer is the teacher's own. Its own template then comes before the student's (`data.chat_template`).
    """
    ours = student_rendering(config).but(source.chat_template_kwargs)
    return replace(ours, template=source.chat_template or (None if foreign else ours.template)).of(tokenizer)


def teacher_source(config: Config, prompt: Prompt) -> TeacherSource:
    """The settings of the teacher that scores a prompt."""
    return config.teacher.others.get(prompt.teacher or "", config.teacher)


def teacher_view(config: Config, source: TeacherSource, tokenizer: Any) -> Callable[[Prompt], Prompt] | None:
    """From the student's prompt to the one that a teacher with the same tokenizer sees; None: it sees the student's."""
    chat = teacher_chat(config, source, tokenizer)
    if source.system is None and source.user is None and chat.renders_like(student_chat(config, tokenizer)):
        return None
    return teacher_prompt(chat, PromptTemplate(source.system, source.user))


def seen_by_teacher(config: Config, tokenizer: Any, prompt: Prompt, foreign: Mapping[str, Any]) -> Prompt | None:
    """A prompt as its teacher sees it; None: as the student does. `foreign`: tokenizers that differ, by section."""
    source = teacher_source(config, prompt)
    section = "teacher" if source is config.teacher else f"teacher.others.{prompt.teacher}"
    if (other := foreign.get(section)) is not None:
        chat = teacher_chat(config, source, other, foreign=True)
        return foreign_prompt(chat, PromptTemplate(source.system, source.user))(prompt)
    view = teacher_view(config, source, tokenizer)
    return view(prompt) if view is not None and "messages" in prompt.metadata else None


def check_chats(config: Config, tokenizer: Any) -> None:
    """Refuse a template of the user's own that renders no chat, and a prefill that is none, before a model is loaded."""
    student_chat(config, tokenizer)
    for place, why in unrenderable(config, tokenizer):
        raise ChatError(f"{place}.chat_template renders no user message: {why}")


def unrenderable(config: Config, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Templates of the user's own that render no chat: the section that names it, and the reason."""
    teachers = {"teacher": config.teacher, **{f"teacher.others.{name}": one for name, one in config.teacher.others.items()}}
    chats = {place: teacher_chat(config, one, tokenizer) for place, one in teachers.items() if one.chat_template is not None}
    if config.data.chat_template is not None:
        chats = {"data": student_chat(config, tokenizer), **chats}
    for place, chat in chats.items():
        try:
            chat.text(EXAMPLE)
        except ChatError as error:
            yield place, str(error)

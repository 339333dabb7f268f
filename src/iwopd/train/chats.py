"""From settings to renderings: how the student's prompts are made, those of evaluations, and those of each teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from iwopd.config import Config, TeacherSource
from iwopd.data.chat import THINKING_OFF, Chat, ChatError, Rendering
from iwopd.data.teacher_view import PromptTemplate, teacher_prompt
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


def check_chats(config: Config, tokenizer: Any) -> None:
    """Refuse a template of the user's own that renders no chat, and a prefill that is none, before a model is loaded."""
    chats = {"data": student_chat(config, tokenizer), "teacher": teacher_chat(config, config.teacher, tokenizer)}
    for section, chat in chats.items():
        if getattr(config, section).chat_template is not None:
            try:
                chat.text(EXAMPLE)
            except ChatError as error:
                raise ChatError(f"{section}.chat_template cannot render a user message: {error}") from None

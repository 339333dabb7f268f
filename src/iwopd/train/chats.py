"""From settings to renderings: how the student's prompts are made, those of evaluations, and those of each teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iwopd.config import Config, TeacherSource
from iwopd.data.chat import THINKING_OFF, Chat
from iwopd.data.teacher_view import PromptTemplate, teacher_prompt
from iwopd.types import Prompt


def student_chat(config: Config, tokenizer: Any) -> Chat:
    """What training prompts are rendered with (`[data]`)."""
    data = config.data
    return Chat(tokenizer, data.chat_template, {**THINKING_OFF, **data.chat_template_kwargs}, data.prefill)


def eval_chat(config: Config, tokenizer: Any) -> Chat:
    """What the problems of evaluations are rendered with: as in training, but for what `[eval]` says."""
    ours = student_chat(config, tokenizer)
    return Chat(tokenizer, ours.template, {**ours.kwargs, **config.eval.chat_template_kwargs}, ours.prefill)


def teacher_chat(config: Config, source: TeacherSource, tokenizer: Any, *, foreign: bool = False) -> Chat:
    """What a teacher's prompts are rendered with: as the student's, but for what its own settings say.

    `foreign`: the tokenizer is the teacher's own. Its own template then comes before the student's (`data.chat_template`).
    """
    ours = config.data
    kwargs = {**THINKING_OFF, **ours.chat_template_kwargs, **source.chat_template_kwargs}
    return Chat(tokenizer, source.chat_template or (None if foreign else ours.chat_template), kwargs, ours.prefill)


def teacher_source(config: Config, prompt: Prompt) -> TeacherSource:
    """The settings of the teacher that scores a prompt."""
    return config.teacher.others.get(prompt.teacher or "", config.teacher)


def teacher_view(config: Config, source: TeacherSource, tokenizer: Any) -> Callable[[Prompt], Prompt] | None:
    """From the student's prompt to the one that a teacher with the same tokenizer sees; None: it sees the student's."""
    chat = teacher_chat(config, source, tokenizer)
    if source.system is None and source.user is None and chat.renders_like(student_chat(config, tokenizer)):
        return None
    return teacher_prompt(chat, PromptTemplate(source.system, source.user))

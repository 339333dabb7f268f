"""The teacher's version of a prompt: another system prompt, or context hidden from the student, e.g. the reference answer."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from iwopd.data.chat import Chat, ChatError, encode

if TYPE_CHECKING:
    from iwopd.types import Prompt


@dataclass(frozen=True)
class PromptTemplate:
    """How the teacher's messages are made from the student's."""

    system: str | None = None
    """The teacher's system message, instead of the student's."""
    user: str | None = None
    """The teacher's last user message: `{prompt}` is the student's, `{answer}` the reference answer, any other name a field
    of the data set."""

    def __post_init__(self) -> None:
        for _, name, spec, conversion in string.Formatter().parse(self.user or ""):
            if name is not None and (not name.isidentifier() or spec or conversion):
                raise ValueError(f"{{{name}}} is not a field: write {{prompt}}, {{answer}} or a name of the data set")

    def messages(self, prompt: Prompt) -> list[dict[str, str]]:
        given = prompt.metadata.get("messages")
        if not isinstance(given, Sequence) or not given:
            raise ChatError(
                f"prompt {prompt.id!r} is not a chat, so the teacher cannot be given another prompt: teacher.system, user, "
                "chat_template and chat_template_kwargs need prompts that were rendered from messages (data.prompts)"
            )
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in given]
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *(m for m in messages if m["role"] != "system")]
        if self.user is not None:
            last = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=None)
            if last is None:
                raise ChatError(f"prompt {prompt.id!r} has no user message for teacher.user to replace")
            messages[last]["content"] = self._fill(prompt, messages[last]["content"])
        return messages

    def _fill(self, prompt: Prompt, content: str) -> str:
        fields: Mapping[str, Any] = {**prompt.metadata, "prompt": content, "answer": prompt.answer}
        assert self.user is not None
        pieces = []
        for text, name, _, _ in string.Formatter().parse(self.user):
            pieces.append(text)
            if name is not None:
                if fields.get(name) is None:
                    raise ChatError(f"teacher.user asks for {{{name}}}, which prompt {prompt.id!r} does not have")
                pieces.append(str(fields[name]))  # not str.format: a field's text may hold braces
        return "".join(pieces)


def foreign_prompt(chat: Chat, template: PromptTemplate) -> Callable[[Prompt], Prompt]:
    """The same for a teacher with another tokenizer, whose chat this is. A prompt that is no chat is its text, encoded anew."""
    change = teacher_prompt(chat, template)

    def see(prompt: Prompt) -> Prompt:
        if "messages" in prompt.metadata:
            return change(prompt)
        ids = encode(chat.tokenizer, prompt.text)
        if not ids:
            raise ChatError(f"prompt {prompt.id!r} has no text, so a teacher with another tokenizer cannot read it")
        whole = tuple(int(i) for i in chat.tokenizer(prompt.text)["input_ids"])  # with the special tokens of a text's beginning
        front = next((whole[:place] for place in range(len(whole)) if whole[place : place + len(ids)] == ids), ())
        return replace(prompt, token_ids=(*front, *ids))

    return see


def teacher_prompt(chat: Chat, template: PromptTemplate) -> Callable[[Prompt], Prompt]:
    """A function from the student's prompt to the teacher's."""

    def change(prompt: Prompt) -> Prompt:
        try:
            text, ids = chat.render(template.messages(prompt))
        except ChatError as error:
            raise ChatError(f"the teacher's version of prompt {prompt.id!r}: {error}") from None
        return replace(prompt, text=text, token_ids=ids)

    return change

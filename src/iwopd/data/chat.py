"""Chat rendering: messages to the text and ids that a model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from iwopd.errors import UserError

THINKING_OFF: Mapping[str, Any] = {"enable_thinking": False}
"""What templates are given unless somebody asks for something else. Those without a thinking mode ignore it."""


class ChatError(UserError, ValueError):
    """Messages that cannot be rendered, with the reason."""


class Rendered(NamedTuple):
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Chat:
    """How messages become the prompt that one model reads: its tokenizer, its template and the template's settings."""

    tokenizer: Any
    template: str | None = None
    """Jinja text instead of the tokenizer's own."""
    kwargs: Mapping[str, Any] = field(default_factory=lambda: THINKING_OFF)
    """What the template is given by name."""
    prefill: str = ""
    """The beginning of every answer: it ends the prompt."""

    def text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Rendered with the generation prompt."""
        template = self.template or self.tokenizer.chat_template
        if not template:
            raise ChatError("the tokenizer has no chat template to render it with")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=True, **self.kwargs
            )
        except Exception as error:  # templates raise anything
            raise ChatError(f"the chat template refuses it: {error}") from None
        return str(text) + self.prefill

    def lead(self) -> str:
        """Whitespace that the template writes between the generation prompt and an answer: such models begin with a space."""
        question, answer = {"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"}
        try:
            before = replace(self, prefill="").text([question])
            whole = str(
                self.tokenizer.apply_chat_template(
                    [question, answer], chat_template=self.template, tokenize=False, add_generation_prompt=False, **self.kwargs
                )
            )
        except Exception:  # no template, or one that raises anything
            return ""
        found, seven, _ = whole.removeprefix(before).partition("7")
        return found if seven and whole.startswith(before) and found.isspace() and not self.prefill else ""

    def render(self, messages: Sequence[Mapping[str, str]]) -> Rendered:
        """Text and ids."""
        text = self.text(messages)
        return Rendered(text, encode(self.tokenizer, text))


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a rendered text, without adding special tokens: the template has added them."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])

"""Chat rendering: messages to the text and ids that a model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from iwopd.errors import UserError


class ChatError(UserError, ValueError):
    """Messages that cannot be rendered, with the reason."""


class Rendered(NamedTuple):
    text: str
    token_ids: tuple[int, ...]


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, thinking: bool = False) -> Rendered:
    """Render with the tokenizer's chat template and generation prompt; thinking is off by default."""
    text = render_text(tokenizer, messages, thinking=thinking)
    return Rendered(text, encode(tokenizer, text))


def render_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, thinking: bool = False) -> str:
    """As `render`, without the ids."""
    if not tokenizer.chat_template:
        raise ChatError("the tokenizer has no chat template to render it with")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
    except Exception as error:  # templates raise anything
        raise ChatError(f"the chat template refuses it: {error}") from None
    return str(text)


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a rendered text, without adding special tokens: the template has added them."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])

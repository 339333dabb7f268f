"""Chat rendering: messages to the text and ids that a model sees."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from iwopd.data.templates import GIVEN, TemplateError, known_names
from iwopd.data.thinking import TAG, opened_at_end
from iwopd.errors import UserError

THINKING = "enable_thinking"
"""The name by which templates with a thinking mode ask for it."""
THINKING_OFF: Mapping[str, Any] = {THINKING: False}
"""What templates are given unless somebody asks for something else. Those without a thinking mode ignore it."""


class ChatError(UserError, ValueError):
    """Messages that cannot be rendered, with the reason."""


class Rendered(NamedTuple):
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Rendering:
    """Settings of a `Chat`, before there is a tokenizer."""

    template: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=lambda: THINKING_OFF)
    prefill: str = ""

    def of(self, tokenizer: Any) -> Chat:
        return Chat(tokenizer, self.template, self.kwargs, self.prefill)

    def but(self, kwargs: Mapping[str, Any]) -> Rendering:
        """The same with further names and values for the template."""
        return replace(self, kwargs={**self.kwargs, **kwargs})

    def outcome(self) -> dict[str, Any]:
        """What of it makes other prompts than the defaults do, in short; `thinking` is always there."""
        others = {name: value for name, value in self.kwargs.items() if name != THINKING}
        template = {} if self.template is None else {"chat_template": hashlib.sha256(self.template.encode()).hexdigest()[:16]}
        more = {"chat_template_kwargs": others, "prefill": self.prefill}
        return {"thinking": self.kwargs.get(THINKING, False), **template, **{name: one for name, one in more.items() if one}}


WITHOUT_THINKING = Rendering()
"""The tokenizer's own template, thinking off."""


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

    def __post_init__(self) -> None:
        if self.prefill and (word := next((one for one in _special(self.tokenizer) if one in self.prefill), None)):
            raise ChatError(
                f"the prefill {self.prefill!r} holds the special token {word!r}, which begins or ends a message: a prefill is "
                "the beginning of an answer's text, so leave it out (the chat template adds what comes before)"
            )

    @property
    def own_template(self) -> str | None:
        """Jinja text of what renders plain chats; None: there is nothing."""
        found = self.template or self.tokenizer.chat_template
        return found.get("default") if isinstance(found, dict) else found

    @property
    def known(self) -> frozenset[str]:
        """Names that the template can be given."""
        try:
            return known_names(self.own_template) if self.own_template else frozenset()
        except TemplateError:  # rendering says it
            return frozenset()

    def asks_for(self, name: str) -> bool:
        """Whether the template does anything with a name, as far as its text tells."""
        try:
            return self.own_template is None or name in GIVEN or name in known_names(self.own_template)
        except TemplateError:
            return True

    @property
    def has_thinking(self) -> bool:
        """Whether the template has a thinking mode, or speaks of thinking blocks."""
        return THINKING in self.known or bool(self.own_template and TAG.search(self.own_template))

    def text(self, messages: Sequence[Mapping[str, str]], *, answered: bool = False) -> str:
        """Rendered with the generation prompt; `answered`: without it, as a conversation that has its answer already."""
        if not self.own_template:
            raise ChatError("the tokenizer has no chat template to render it with")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=not answered, **self.kwargs
            )
        except Exception as error:  # templates raise anything
            raise ChatError(f"the chat template refuses it: {error}") from None
        return str(text) if answered else str(text) + self.prefill

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

    def begun(self, text: str) -> str:
        """What of the answer a rendered prompt holds already: the thinking block that it opens, and the prefill."""
        before = text.removesuffix(self.prefill) if self.prefill else text
        return opened_at_end(before) + self.prefill

    def renders_like(self, other: Chat) -> bool:
        """Whether both make the same of every chat, with one tokenizer."""
        ours, theirs = ((one.template, dict(one.kwargs), one.prefill) for one in (self, other))
        return self.tokenizer is other.tokenizer and ours == theirs


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a rendered text, without adding special tokens: the template has added them."""
    try:
        return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raise nothing more special
        strange = next((letter for letter in dict.fromkeys(text) if not _can_encode(tokenizer, letter)), None)
        what = f"the letter {strange!r}" if strange is not None else f"the text {text[:40]!r}"
        raise ChatError(
            f"the tokenizer cannot encode {what} ({error}): take it out, or choose a model whose tokenizer knows it"
        ) from None


def _can_encode(tokenizer: Any, letter: str) -> bool:
    try:
        tokenizer(letter, add_special_tokens=False)
    except Exception:
        return False
    return True


def _special(tokenizer: Any) -> list[str]:
    """Special tokens by name, without the tags of thinking blocks, which are text of an answer."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {*map(str, tokenizer.all_special_tokens), *(str(token) for token in added if token.special)}
    return sorted((name for name in names if not TAG.fullmatch(name)), key=lambda name: (-len(name), name))

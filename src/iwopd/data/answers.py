"""Answers that a data set brings along, as ids that the student could have written itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from iwopd.data.chat import Chat, ChatError, encode
from iwopd.data.fields import DataError, lookup
from iwopd.types import Prompt

_TURNS = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
"""Short and plain: every tokenizer can encode it."""


def answer_text(prompt: Prompt, field: str | None) -> str | None:
    """What the record says under `field` (None: its reference answer); None if there is nothing."""
    found = prompt.answer if field is None else lookup(prompt.metadata, field)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        found = str(found)
    return found if isinstance(found, str) and found.strip() else None


def check_answers(prompts: Sequence[Prompt], field: str | None) -> None:
    """Refuse a data set in which some records have no answer under this field."""
    lacking = [prompt for prompt in prompts if answer_text(prompt, field) is None]
    if not lacking:
        return
    there = sorted(name for name in lacking[0].metadata if name != "messages")
    what = "reference answer" if field is None else f"text in the field {field!r}"
    raise DataError(
        f"{len(lacking):,} of {len(prompts):,} training prompts have no {what}, such as {lacking[0].id!r}, whose fields are "
        f"{', '.join(there) or 'none'}"
    )


def end_of_answer(chat: Chat, stops: Collection[int]) -> int:
    """The id that ends an answer: the one of `stops` that the chat template writes behind it, else the tokenizer's."""
    try:
        text = chat.tokenizer.apply_chat_template(_TURNS, chat_template=chat.template, tokenize=False, **chat.kwargs)
        ends = [id_ for id_ in encode(chat.tokenizer, str(text).rpartition("3")[2]) if id_ in stops]
    except Exception:  # templates raise anything, and some know no assistant
        ends = []
    found = ends[0] if ends else chat.tokenizer.eos_token_id
    if found is None:
        raise ChatError("the tokenizer has no end-of-sequence token, so answers of a data set cannot be ended")
    return int(found)


@dataclass(frozen=True)
class AnswerTokens:
    """From the text of an answer to ids: as a turn of the assistant that follows the rendered prompt."""

    chat: Chat
    stops: frozenset[int]
    """Ids at which sampling stops: nothing follows the first of them."""
    end: int
    """The id that ends an answer which holds none of them."""

    @classmethod
    def of(cls, chat: Chat, stops: Collection[int]) -> AnswerTokens:
        return cls(chat, frozenset(stops), end_of_answer(chat, stops))

    def ids(self, prompt: Prompt, text: str) -> list[int]:
        """With the end of the answer. A beginning that ends the prompt already (`Chat.prefill`) is not repeated."""
        try:
            found = list(encode(self.chat.tokenizer, text.removeprefix(self.chat.prefill)))
        except Exception as error:  # a tokenizer without a token for it
            raise DataError(f"the answer to prompt {prompt.id!r} cannot be tokenised: {error}") from None
        stop = next((place for place, id_ in enumerate(found) if id_ in self.stops), None)
        return [*found, self.end] if stop is None else found[: stop + 1]

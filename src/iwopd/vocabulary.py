"""What token ids mean: the bytes of every id, which ids are no text, how an answer ends, and whether two tokenizers agree.

Equal sizes prove nothing: a permuted vocabulary has the same size, and a teacher that reads other texts than the student wrote
still returns plausible numbers. So every id is compared by its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from iwopd.model_facts import output_rows
from iwopd.models import ModelError, ModelSource, brings_tokenizer, load_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of every id; for a special token those of its name."""
    kind = _decoder(tokenizer)
    added = set(map(int, getattr(tokenizer, "added_tokens_decoder", {})))
    vocabulary = tokenizer.get_vocab().items()
    return {int(i): token.encode() if i in added else _plain_bytes(token, kind) for token, i in vocabulary}


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that are no text: special added tokens and those with a role (end, padding, unknown). Other added tokens are text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(int(i) for i, token in added if token.special) | frozenset(map(int, tokenizer.all_special_ids))


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What the ids of a tokenizer write."""

    pieces: Mapping[int, bytes]
    """The bytes of every id that is text. Special ids have none."""
    marks_spaces: bool
    """Spaces are written as ▁ (SentencePiece): such tokenizers may put one in front of a text that has none."""

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        special = special_ids(tokenizer)
        pieces = {i: piece for i, piece in token_bytes(tokenizer).items() if i not in special}
        return cls(pieces, _decoder(tokenizer) == "sentencepiece")

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Ids that are one byte, for bytes that are no whole character; not every tokenizer has them."""
        return {piece[0]: i for i, piece in self.pieces.items() if len(piece) == 1}


def answer_end(tokenizer: Any, template: str | None = None, kwargs: Mapping[str, Any] | None = None) -> int | None:
    """The id with which an answer ends: what the chat template writes after one, or the end-of-sequence token."""
    ending = template_ending(tokenizer, template, kwargs)
    return ending if ending is not None or tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def template_ending(tokenizer: Any, template: str | None = None, kwargs: Mapping[str, Any] | None = None) -> int | None:
    """The id of the special token that the chat template puts after an answer; None if there is none.

    `template` is Jinja text instead of the tokenizer's own, `kwargs` what it is given by name (as `data.chat.Chat` has them).
    """
    if not (template or tokenizer.chat_template):
        return None
    given = {"enable_thinking": False} if kwargs is None else dict(kwargs)
    messages = [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"}]
    try:
        text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **given))
    except Exception:  # templates raise anything, for instance if they do not know the role
        return None
    after = text.rpartition("7")[2]
    special = {str(token): int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [(after.index(word), i) for word, i in special.items() if word in after]
    return min(found)[1] if found else None


@dataclass(frozen=True)
class Agreement:
    """How far two vocabularies agree."""

    ids: int
    """Ids of the first."""
    wrong: tuple[int, ...]
    """Ids that mean something else in the second, or nothing."""
    extra: int
    """Ids that only the second has."""
    example: str
    """A description of the first wrong one; empty if there is none."""

    @property
    def same(self) -> bool:
        return not self.wrong


def compare_vocabularies(ours: Any, theirs: Any) -> Agreement:
    """Whether every id that `ours` can produce means the same bytes in `theirs`."""
    mine, other = token_bytes(ours), token_bytes(theirs)
    wrong = tuple(i for i in sorted(mine) if other.get(i) != mine[i])
    example = ""
    if wrong:
        first = wrong[0]
        example = f"id {first} is {_show(mine[first])} for the student and {_show(other.get(first))} for the teacher"
    return Agreement(len(mine), wrong, len(other.keys() - mine.keys()), example)


def check_same_tokenizer(tokenizer: Any, other: str | Path | ModelSource, *, trust_remote_code: bool = False) -> None:
    """If the model at `other` has a tokenizer, its ids must mean the same as the student's."""
    if not brings_tokenizer(other):
        return
    try:
        theirs = load_tokenizer(other, trust_remote_code=trust_remote_code)
    except ModelError:
        return  # it has none
    agreement = compare_vocabularies(tokenizer, theirs)
    if not agreement.same:
        raise ModelError(
            f"{agreement.example} {other} ({len(agreement.wrong):,} of {agreement.ids:,} ids differ): their "
            "tokenizers differ, so the teacher would score other texts than the student wrote; choose a pair of one family, or "
            "let training align them by text (teacher.tokenizer = 'auto')"
        )


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """The model called `name` must have a row of its output matrix for every id that it will be given."""
    rows = output_rows(model)
    if rows < len(tokenizer):
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} ids, the {name}'s output matrix {rows} rows: they do not belong together. "
            "Without tokenizer files of its own a model is given the student's ids (teacher.tokenizer names others)"
        )


def _decoder(tokenizer: Any) -> str:
    """How the tokenizer writes bytes as token strings: `byte-level` (GPT-2's letters), `sentencepiece` (▁, <0x0A>) or plain."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer written in Python: how it encodes a space shows its decoder
        return "byte-level" if "Ġ" in tokenizer.get_vocab() else "sentencepiece"
    parts = [json.loads(part.__getstate__()) for part in (backend.decoder, backend.pre_tokenizer) if part is not None]
    described = json.dumps(parts)
    if '"ByteLevel"' in described:
        return "byte-level"
    return "sentencepiece" if '"ByteFallback"' in described or "▁" in described or "\\u2581" in described else "plain"


def _plain_bytes(token: str, kind: str) -> bytes:
    if kind == "byte-level" and all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    if kind == "sentencepiece":
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()
    return token.encode(errors="surrogatepass")


def _byte_letters() -> dict[str, int]:
    """GPT-2's byte letters: printable bytes are themselves, the others the letters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _show(value: bytes | None) -> str:
    return "nothing" if value is None else repr(value.decode(errors="backslashreplace"))

"""A text as another tokenizer writes it: ids whose bytes are exactly the text's, and where that cannot be had, which bytes are
lost.

A tokenizer does not write a text as the sum of its parts. It joins the first characters with what stands before them
(SentencePiece puts a space in front of a text by itself), reads the names of special tokens as special tokens, and may change
characters (NFC, lower case) or have none for them. So a text is tried in its context, then by itself, and each time the bytes
behind the ids are compared with the text's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iwopd.vocabulary import Vocabulary, special_ids

CONTEXTS = ("\n", "a")
"""What is put before a text that stands in the middle of another, where the real context cannot be."""


@dataclass(frozen=True)
class Unit:
    """The smallest piece of a text whose bytes and ids are known to belong together: usually one token."""

    ids: tuple[int, ...]
    """None of them: the tokenizer has nothing for these bytes."""
    length: int
    """Bytes of the text; 0 for a space that only the tokenizer sees."""
    exact: bool = True
    """The ids write just these bytes. If not, they are what the tokenizer makes of them: context, but no score."""


class Retokenizer:
    """Writes texts with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.vocabulary = tokenizer, Vocabulary.of(tokenizer)
        names = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = frozenset(map(int, names))
        self._special = tuple(str(names[i]) for i in special_ids(tokenizer) if i in names)
        self._encodable: dict[str, bool] = {}
        self._lock = threading.Lock()  # how a fast tokenizer treats special tokens is a switch of the tokenizer

    def units(self, data: bytes, before: str | None = None) -> list[Unit]:
        """What writes these bytes after the text `before`; None: in the middle of some text.

        Bytes that are no whole character (an answer cut off in one) are written by byte tokens, if there are any.
        """
        found: list[Unit] = []
        for piece, valid in whole_characters(data):
            if valid:
                found += self._text(piece.decode(), before if not found else None)
            else:
                found += [self._byte(byte) for byte in piece]
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which the names of special tokens are special tokens."""
        return self._call(text, plain=False)[0]

    def _byte(self, byte: int) -> Unit:
        known = self.vocabulary.byte_ids.get(byte)
        return Unit((), 1, exact=False) if known is None else Unit((known,), 1)

    def _text(self, text: str, before: str | None) -> list[Unit]:
        data, first = text.encode(), None
        for ids, offsets in self._tries(text, before):
            if (found := self._exact(ids, data)) is not None:
                return found
            if first is None and offsets is not None:
                first = ids, offsets
        return self._letters(text) if first is None else self._by_offsets(*first, text)

    def _tries(self, text: str, before: str | None) -> Iterator[tuple[list[int], list[tuple[int, int]] | None]]:
        """Ids of the text and the characters that each stands for, in several contexts, the real one first."""
        plain = any(name in text for name in self._special)  # what was written letter by letter is no special token
        contexts = [before, "", *CONTEXTS] if before is not None else [*CONTEXTS, ""]
        for context in contexts:
            if context is None or (plain and context == before and context):
                continue
            try:
                ids, offsets = self._call(context + text, plain=context != before or plain)
                front = self._call(context, plain=context != before or plain)[0] if context else []
            except Exception:  # tokenizers without an id for unknown text raise their library's own errors
                continue
            if ids[: len(front)] == front:
                start = len(context)
                within = None if offsets is None else [(max(0, a - start), max(0, b - start)) for a, b in offsets[len(front) :]]
                yield ids[len(front) :], within

    def _call(self, text: str, *, plain: bool) -> tuple[list[int], list[tuple[int, int]] | None]:
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        with self._lock:
            found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain, return_offsets_mapping=fast)
        return [int(i) for i in found["input_ids"]], [tuple(pair) for pair in found["offset_mapping"]] if fast else None

    def _exact(self, ids: Sequence[int], data: bytes) -> list[Unit] | None:
        """The ids one by one, if they write the text.

        Some tokenizers put a space of their own before a text, and again after every added token: it has no bytes.
        """
        units: list[Unit] = []
        place = 0
        for segment in self._segments(ids):
            pieces = [self.vocabulary.pieces[i] for i in segment if i in self.vocabulary.pieces]
            written = b"".join(pieces)
            if len(pieces) < len(segment):
                return None
            here = [Unit((i,), len(piece)) for i, piece in zip(segment, pieces, strict=True)]
            if not data.startswith(written, place):
                if not (self.vocabulary.marks_spaces and written[:1] == b" " and data.startswith(written[1:], place)):
                    return None
                here[0] = replace(here[0], length=here[0].length - 1)
            units += here
            place += sum(unit.length for unit in here)
        return units if place == len(data) else None

    def _segments(self, ids: Sequence[int]) -> list[list[int]]:
        """Added tokens by themselves, and what stands between them: each is tokenised as a text of its own."""
        found: list[list[int]] = []
        for i in ids:
            if found and i not in self._added and found[-1][-1] not in self._added:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def _by_offsets(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> list[Unit]:
        """Stretch by stretch: where ids write the characters that they stand for, they count; elsewhere they do not."""
        groups: list[tuple[int, int, list[int]]] = []
        for i, (start, end) in zip(ids, offsets, strict=True):
            until = groups[-1][1] if groups else 0
            if groups and (start < until or end <= until):
                groups[-1] = (groups[-1][0], max(until, end), [*groups[-1][2], i])
            else:  # what stands between two tokens (a trimmed space) belongs to the second
                groups.append((until, end, [i]))
        found: list[Unit] = []
        for start, end, together in groups:
            data = text[start:end].encode()
            context = tuple(i for i in together if i in self.vocabulary.pieces)  # never a special token for a text
            found += self._exact(together, data) or [Unit(context, len(data), exact=False)]
        rest = text[groups[-1][1] if groups else 0 :].encode()
        return [*found, *([Unit((), len(rest), exact=False)] if rest else [])]

    def _letters(self, text: str) -> list[Unit]:
        """For a tokenizer that refuses the text: stretches of characters that it knows, and the others."""
        for letter in set(text) - self._encodable.keys():
            try:
                self._encodable[letter] = self._exact(self._call(letter, plain=True)[0], letter.encode()) is not None
            except Exception:  # as above
                self._encodable[letter] = False
        stretches: list[str] = []
        for letter in text:
            if stretches and self._encodable[letter] and self._encodable[stretches[-1][-1]]:
                stretches[-1] += letter
            else:
                stretches.append(letter)
        if stretches == [text]:  # it refuses it as a whole, for whatever reason
            return [Unit((), len(text.encode()), exact=False)]
        found: list[Unit] = []
        for one in stretches:
            known = self._encodable[one[0]]
            found += self._text(one, None) if known else [Unit((), len(one.encode()), exact=False)]
        return found


def whole_characters(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """The bytes in stretches: whole characters of UTF-8 (true), and bytes that are none (false)."""
    start = 0
    while start < len(data):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield data[start : start + error.start], True
            yield data[start + error.start : start + error.end], False
            start += error.end
        else:
            yield data[start:], True
            return

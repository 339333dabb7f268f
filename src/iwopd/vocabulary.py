"""What token ids mean: the bytes of every id, and whether two tokenizers agree on them.

Equal sizes prove nothing: a permuted vocabulary has the same size, and a teacher that reads other texts than the student wrote
still returns plausible numbers. So every id is compared by its bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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
            "tokenizers differ, so the teacher would score other texts than the student wrote; choose a pair of one family"
        )


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """The model called `name` must have a row of its output matrix for every id of the student's tokenizer."""
    rows = output_rows(model)
    if rows < len(tokenizer):
        raise ModelError(
            f"the student's tokenizer has {len(tokenizer)} ids, the {name}'s output matrix {rows} rows: both models must share "
            "the student's vocabulary"
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

"""Requests for the log-probs of given token ids, and how the responses are parsed.

Responses are not trusted: the ids are compared with those that were sent, and every token must have a valid log-prob.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from iwopd.config.distributions import GIVES
from iwopd.teacher.errors import TeacherError

IMPOSSIBLE = -9999.0
"""JSON has no infinity; vLLM (and SGLang's clients) write this for minus infinity."""
ROUNDING = 1e-3
"""A log-prob may exceed 0 by this much: half precision."""


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, of which those from `start` on are to be scored."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Drawn:
    """A token that the server sampled at temperature 1, with its log-prob."""

    id: int
    logprob: float


class Dialect(Protocol):
    """The protocol of one kind of server."""

    path: str
    gives: frozenset[str]
    """What it can say of tokens beside their log-probs."""

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence]) -> dict[str, Any]:
        """The request that scores these sequences."""

    def scores(self, answer: Any, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """Log-probs of the ids from `start` on, per sequence; -inf for impossible tokens."""

    def drawing(self, model: str | None, ids: Sequence[int]) -> dict[str, Any]:
        """The request that samples one more token at temperature 1."""

    def drawn(self, answer: Any) -> Drawn: ...


class VllmDialect:
    """OpenAI's completions with vLLM's `prompt_logprobs` and `return_token_ids`; also that of `iwopd serve-teacher`."""

    path = "/v1/completions"
    gives = GIVES["vllm"]

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence]) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": [list(sequence.ids) for sequence in sequences],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }

    def scores(self, answer: Any, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        choices = _field(answer, "choices", list)
        by_index = {_field(choice, "index", int): choice for choice in choices}
        if len(choices) != len(sequences) or by_index.keys() != set(range(len(sequences))):
            raise TeacherError(f"{len(sequences)} sequences were sent, the answer has choices {sorted(by_index)}")
        return [self._read(by_index[place], sequence) for place, sequence in enumerate(sequences)]

    def _read(self, choice: Any, sequence: TokenSequence) -> list[float]:
        _check_echo(_field(choice, "prompt_token_ids", list, "does it know return_token_ids?"), sequence.ids)
        entries = _field(choice, "prompt_logprobs", list, "does it know prompt_logprobs?")
        if len(entries) != len(sequence.ids):
            raise TeacherError(f"{len(sequence.ids)} ids were sent, the answer has {len(entries)} prompt_logprobs")
        if entries[0] is not None:
            raise TeacherError("the first id has a log-prob although nothing precedes it: the answer is shifted")
        values = []
        for place in range(sequence.start, len(entries)):
            token, entry = sequence.ids[place], entries[place]
            if not isinstance(entry, Mapping) or str(token) not in entry:
                raise TeacherError(f"there is no log-prob of id {token} at position {place}: the answer is shifted or cut")
            values.append(_logprob(_field(entry[str(token)], "logprob", object), place))
        return values

    def drawing(self, model: str | None, ids: Sequence[int]) -> dict[str, Any]:
        body = {"model": model, "prompt": [list(ids)], "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        return {**body, "logprobs": 0, "return_token_ids": True}

    def drawn(self, answer: Any) -> Drawn:
        choice = _first(_field(answer, "choices", list))
        logprobs = _field(_field(choice, "logprobs", dict), "token_logprobs", list)
        return Drawn(_int(_first(_field(choice, "token_ids", list))), _logprob(_first(logprobs), 0))


class SglangDialect:
    """SGLang's own `/generate`. Written from its sources; never run against a real server."""

    path = "/generate"
    gives = GIVES["sglang"]

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence]) -> dict[str, Any]:
        return {
            "input_ids": [list(sequence.ids) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The entry at this position has no log-prob: they begin one token later.
            "logprob_start_len": [sequence.start - 1 for sequence in sequences],
        }

    def scores(self, answer: Any, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        if not isinstance(answer, list) or len(answer) != len(sequences):
            raise TeacherError(f"{len(sequences)} sequences were sent, the answer is {_brief(answer)}")
        return [self._read(item, sequence) for item, sequence in zip(answer, sequences, strict=True)]

    def _read(self, item: Any, sequence: TokenSequence) -> list[float]:
        entries = [_pair(entry) for entry in _field(_field(item, "meta_info", dict), "input_token_logprobs", list)]
        _check_echo([token for _, token in entries], sequence.ids[sequence.start - 1 :])
        if entries[0][0] is not None:
            raise TeacherError("the entry before the first scored id has a log-prob: the answer is shifted")
        return [_logprob(value, sequence.start + place) for place, (value, _) in enumerate(entries[1:])]

    def drawing(self, model: str | None, ids: Sequence[int]) -> dict[str, Any]:
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": [list(ids)], "sampling_params": params, "return_logprob": True}

    def drawn(self, answer: Any) -> Drawn:
        entries = _field(_field(_first(answer), "meta_info", dict), "output_token_logprobs", list)
        value, token = _pair(_first(entries))
        return Drawn(_int(token), _logprob(value, 0))


DIALECTS: dict[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}


def _check_echo(echoed: Sequence[Any], sent: Sequence[int]) -> None:
    if list(echoed) != list(sent):
        pairs = zip(sent, echoed, strict=False)
        place = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(sent), len(echoed)))
        raise TeacherError(
            f"the ids in the answer are not those that were sent ({len(sent)} sent, {len(echoed)} came back, the first "
            f"difference is at position {place}): the server scored something else"
        )


def _logprob(value: Any, place: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TeacherError(f"the log-prob at position {place} is {_brief(value)}, not a number")
    number = float(value)
    if math.isnan(number) or number > ROUNDING:
        raise TeacherError(f"the log-prob at position {place} is {number}: it must be at most 0")
    return -math.inf if number <= IMPOSSIBLE else number


def _field(item: Any, name: str, kind: type, hint: str = "") -> Any:
    if not isinstance(item, Mapping) or name not in item or not isinstance(item[name], kind):
        found = _brief(item.get(name)) if isinstance(item, Mapping) else _brief(item)
        raise TeacherError(f"the answer has no usable {name!r} (it has {found})" + (f"; {hint}" if hint else ""))
    return item[name]


def _first(items: Any) -> Any:
    if not isinstance(items, list) or not items:
        raise TeacherError(f"the answer has {_brief(items)} where a non-empty list should be")
    return items[0]


def _pair(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, list) or len(entry) < 2:
        raise TeacherError(f"the answer has {_brief(entry)} where [log-prob, id, text] should be")
    return entry[0], entry[1]


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TeacherError(f"the answer has {_brief(value)} where a token id should be")
    return value


def _brief(value: Any) -> str:
    about = f"of {len(value)}" if isinstance(value, (list, dict)) else repr(value)
    return f"{type(value).__name__} {about}"[:80]

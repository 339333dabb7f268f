"""Reading answers that other people's servers wrote in JSON. Nothing in them is taken for granted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.views import TokenScores
from iwopd.teacher.consistency import ROUNDING
from iwopd.teacher.errors import TeacherError

IMPOSSIBLE = -9999.0
"""JSON has no infinity; vLLM (and SGLang's clients) write this for minus infinity."""
LEAST_REST = 1e-6
"""Probability that is left for ids outside the likeliest, at least. Such servers send no rest, so that it is 1 minus a sum of
float32 probabilities, whose common normaliser is rounded by about 1e-6: what is smaller is noise, and may be negative."""
BYTES_PER_ENTRY = 2**8
"""Of an id with its log-prob; servers may add its rank and text."""

Likeliest = list[tuple[float, int]]
"""Log-probs and ids of one token, likeliest first."""


def check_echo(echoed: Sequence[Any], sent: Sequence[int]) -> None:
    if list(echoed) != list(sent):
        pairs = zip(sent, echoed, strict=False)
        place = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(sent), len(echoed)))
        raise TeacherError(
            f"the ids in the answer are not those that were sent ({len(sent)} sent, {len(echoed)} came back, the first "
            f"difference is at position {place}): the server scored something else"
        )


def with_likeliest(logprobs: Sequence[float], likeliest: Sequence[Likeliest], k: int) -> TokenScores:
    """Scores of tokens whose k likeliest ids are known, and nothing of the rest but its sum."""
    pairs = torch.tensor(likeliest, dtype=torch.float64).view(-1, k, 2)  # ids are exact in float64
    values = pairs[..., 0]
    rest = (1 - values.exp().sum(-1)).clamp(min=LEAST_REST).log()
    return TokenScores(floats(logprobs), top_ids=pairs[..., 1].long(), top_logprobs=values.float(), rest=rest.float())


def floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def logprob(value: Any, place: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TeacherError(f"the log-prob at position {place} is {brief(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:  # JSON's whole numbers have no limit
        raise TeacherError(f"the log-prob at position {place} is {brief(value)}, which no float holds") from None
    if math.isnan(number) or number > ROUNDING:
        raise TeacherError(f"the log-prob at position {place} is {number}: it must be at most 0")
    return -math.inf if number <= IMPOSSIBLE else number


def part(item: Any, name: str, kind: type, hint: str = "") -> Any:
    if not isinstance(item, Mapping) or name not in item or not isinstance(item[name], kind):
        found = brief(item.get(name)) if isinstance(item, Mapping) else brief(item)
        raise TeacherError(f"the answer has no usable {name!r} (it has {found})" + (f"; {hint}" if hint else ""))
    return item[name]


def first(items: Any) -> Any:
    if not isinstance(items, list) or not items:
        raise TeacherError(f"the answer has {brief(items)} where a non-empty list should be")
    return items[0]


def pair(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, list) or len(entry) < 2:
        raise TeacherError(f"the answer has {brief(entry)} where [log-prob, id, text] should be")
    return entry[0], entry[1]


def token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise TeacherError(f"the answer has {brief(value)} where a token id should be")
    return value


def brief(value: Any) -> str:
    about = f"of {len(value)}" if isinstance(value, (list, dict)) else repr(value)
    return f"{type(value).__name__} {about}"[:80]

"""Rollouts, token by token, in few bytes: a page may hold a million tokens with five numbers each.

A number becomes a 24-bit integer in steps of 1/10,000 (0 stands for "none"); a column is stored as its low, middle and high
bytes, which lets gzip find that the high ones hardly change. `gap` is stored as its difference from teacher minus student,
which is nothing but rounding; weights as differences from token to token. `assets/tokens.js` undoes all this, one rollout
at a time.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iwopd.runs.logs import number

STEPS = 10_000
ZERO = 2**23
DRIFT = -2.0
"""A token drifts where the gap falls below this: the teacher finds it e^2, some seven times, less likely than the student."""

COLUMNS = {"student": "student_logprobs", "teacher": "teacher_logprobs", "gap": "gap", "weight": "weights", "kl": "kl"}
"""Our names and those of `rollouts.jsonl`."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Packed:
    """One rollout: what lists, filters and sorting need in the open, the rest as base64 of gzip."""

    step: int
    task: str
    prompt_id: str
    correct: bool | None
    stop_reason: str
    length: int
    drift: int | None
    """Place of the first token that drifts, from 0."""
    drifts: int
    abs_gap: float | None
    kl: float | None
    columns: tuple[str, ...]
    blob: str

    def as_json(self) -> list[Any]:
        """The fields in the order of their declaration, which `tokens.js` knows."""
        return list(astuple(self))


class TokenTable:
    """Every different token once, by id and text."""

    def __init__(self) -> None:
        self.places: dict[tuple[int | None, str], int] = {}

    def place(self, token_id: int | None, text: str) -> int:
        return self.places.setdefault((token_id, text), len(self.places))

    def blob(self) -> str:
        return squeeze(json.dumps([list(pair) for pair in self.places]).encode())


def pack_rollout(record: Mapping[str, Any], table: TokenTable) -> Packed | None:
    """Pack a record of `rollouts.jsonl`; None if it has no tokens, or numbers that do not fit them."""
    tokens, ids = record.get("tokens"), record.get("token_ids")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return None
    if not isinstance(ids, list) or len(ids) != len(tokens):
        ids = [None] * len(tokens)
    ids = [one if isinstance(one, int) and not isinstance(one, bool) else None for one in ids]
    given = {name: values for name, key in COLUMNS.items() if isinstance(values := record.get(key), list)}
    columns = {name: _numbers(values) for name, values in given.items() if len(values) == len(tokens)}
    numbers = {name: column for name, column in columns.items() if column.ndim == 1}
    spans = record.get("spans")
    gaps = _once(numbers.get("gap", np.zeros(0)), spans)
    drifting = np.flatnonzero(gaps < DRIFT)
    header = {**{key: _text(record.get(key)) for key in ("prompt", "answer")}, **({"spans": True} if spans else {})}
    places = np.array([table.place(*pair) for pair in zip(ids, tokens, strict=True)], dtype=np.int64)
    stored = {"token": places, **_differences({name: _quantised(column) for name, column in numbers.items()})}
    correct = record.get("correct")
    return Packed(
        step=record["step"],
        task=str(record.get("task") or "")[:300],
        prompt_id=str(record.get("prompt_id", "?"))[:300],
        correct=correct if isinstance(correct, bool) else None,
        stop_reason=str(record.get("stop_reason", "?"))[:20],
        length=len(tokens),
        drift=int(drifting[0]) if len(drifting) else None,
        drifts=len(drifting),
        abs_gap=_mean(np.abs(gaps)),
        kl=_mean(numbers.get("kl", np.zeros(0))),
        columns=tuple(stored),
        blob=squeeze(_joined(header, stored)),
    )


def _once(gaps: Floats, spans: Any) -> Floats:
    """The gaps of a teacher with another tokenizer, each on the last token of its span only: NaN elsewhere."""
    if not isinstance(spans, list) or len(spans) != len(gaps):
        return gaps
    last = {span: place for place, span in enumerate(spans) if isinstance(span, int) and span >= 0}
    counted = np.full_like(gaps, np.nan)
    places = list(last.values())
    counted[places] = gaps[places]
    return counted


def squeeze(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def _numbers(values: list[Any]) -> Floats:
    """Values as floats, NaN where there is no finite number. A million of them go through here, so the usual case is quick."""
    try:
        numbers = np.array(values, dtype=np.float64)  # null becomes NaN
    except (TypeError, ValueError, OverflowError):
        numbers = np.array([np.nan if (value := number(one)) is None else value for one in values], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _quantised(numbers: Floats) -> Ints:
    whole = np.rint(np.clip(numbers * STEPS, 1 - ZERO, ZERO - 1))
    return np.where(np.isnan(numbers), 0, np.nan_to_num(whole) + ZERO).astype(np.int64)


def _differences(columns: dict[str, Ints]) -> dict[str, Ints]:
    """Columns that can be told from others, or from their own past, as what is left over."""
    stored = dict(columns)
    if {"gap", "teacher", "student"} <= columns.keys():
        known = (columns["teacher"] > 0) & (columns["student"] > 0)
        guess = np.where(known, columns["teacher"] - columns["student"] + ZERO, 0)
        stored["gap"] = (columns["gap"] - guess) % 2**24
    if "weight" in columns:
        stored["weight"] = np.diff(columns["weight"], prepend=0) % 2**24
    return stored


def _joined(header: dict[str, Any], columns: dict[str, Ints]) -> bytes:
    words = json.dumps(header).encode()
    planes = [((column >> shift) & 255).astype(np.uint8).tobytes() for column in columns.values() for shift in (0, 8, 16)]
    return len(words).to_bytes(4, "little") + words + b"".join(planes)


def _text(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(f"{known.mean():.5g}") if len(known) else None

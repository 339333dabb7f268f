"""Rollouts in few bytes: what is unpacked is what was packed, to the fourth decimal."""

from __future__ import annotations

import base64
import gzip
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser.report_runs import rollout
from iwopd.report.token_columns import STEPS, ZERO, Packed, TokenTable, pack_rollout


def unpack(packed: Packed, table: TokenTable) -> dict[str, Any]:
    """What `assets/tokens.js` does, written down once more."""
    raw = gzip.decompress(base64.b64decode(packed.blob))
    size = int.from_bytes(raw[:4], "little")
    found: dict[str, Any] = json.loads(raw[4 : 4 + size])
    planes = np.frombuffer(raw[4 + size :], dtype=np.uint8).reshape(len(packed.columns), 3, packed.length).astype(np.int64)
    columns = dict(zip(packed.columns, planes[:, 0] + (planes[:, 1] << 8) + (planes[:, 2] << 16), strict=True))
    entries = list(table.places)
    found["tokens"] = [entries[place] for place in columns.pop("token")]
    if {"gap", "teacher", "student"} <= columns.keys():
        known = (columns["teacher"] > 0) & (columns["student"] > 0)
        guess = np.where(known, columns["teacher"] - columns["student"] + ZERO, 0)
        columns["gap"] = (columns["gap"] + guess) % 2**24
    if "weight" in columns:
        columns["weight"] = np.cumsum(columns["weight"]) % 2**24
    for name, column in columns.items():
        found[name] = [None if value == 0 else (value - ZERO) / STEPS for value in column.tolist()]
    return found


def test_round_trip() -> None:
    table = TokenTable()
    record = rollout(10, 2, random.Random(0), 200)
    packed = pack_rollout(record, table)
    assert packed is not None
    found = unpack(packed, table)
    names = {"student": "student_logprobs", "teacher": "teacher_logprobs", "gap": "gap", "weight": "weights", "kl": "kl"}
    for mine, theirs in names.items():
        assert found[mine] == pytest.approx(record[theirs], abs=0.51 / STEPS)
    assert found["tokens"] == list(zip(record["token_ids"], record["tokens"], strict=True))
    assert (found["prompt"], found["answer"]) == (record["prompt"], record["answer"])
    drifting = [place for place, gap in enumerate(record["gap"]) if gap < -2]
    assert (packed.drift, packed.drifts) == (drifting[0], len(drifting))
    assert packed.abs_gap == pytest.approx(sum(map(abs, record["gap"])) / 200, rel=1e-4)


number = st.none() | st.floats(-800, 800) | st.sampled_from([float("inf"), float("nan"), -100.0, 0, 1, "x", True, 10**400])


@given(st.lists(st.tuples(number, number, number, number, number, st.text(max_size=3)), max_size=8))
def test_any_numbers_and_tokens(rows: list[tuple[Any, ...]]) -> None:
    table = TokenTable()
    keys = ("student_logprobs", "teacher_logprobs", "gap", "weights", "kl", "tokens")
    record: dict[str, Any] = {"step": 1, **{key: [row[place] for row in rows] for place, key in enumerate(keys)}}
    packed = pack_rollout(record, table)
    assert packed is not None
    found = unpack(packed, table)
    assert [text for _, text in found["tokens"]] == record["tokens"]
    for mine, theirs in {"student": "student_logprobs", "gap": "gap", "weight": "weights", "kl": "kl"}.items():
        for got, given_value in zip(found.get(mine, []), record[theirs], strict=False):
            fits = isinstance(given_value, (int, float)) and abs(given_value) <= 800
            assert (got is not None) == fits
            assert not fits or got == pytest.approx(float(given_value), abs=0.51 / STEPS)


@pytest.mark.parametrize(
    "record",
    [{"step": 1}, {"step": 1, "tokens": None}, {"step": 1, "tokens": "abc"}, {"step": 1, "tokens": ["a", 3]}],
)
def test_records_without_tokens_are_refused(record: dict[str, Any]) -> None:
    assert pack_rollout(record, TokenTable()) is None


def test_columns_that_do_not_fit_are_left_out() -> None:
    record = {"step": 1, "tokens": ["a", "b"], "gap": [1.0], "weights": [[1], [2]], "kl": "no", "token_ids": [1]}
    packed = pack_rollout(record, TokenTable())
    assert packed is not None
    assert packed.columns == ("token",)
    assert packed.drift is None


def test_a_million_tokens_fit() -> None:
    """14 bytes of numbers a token (24 bits x 5, less what compresses) would not leave room for 20 MB with base64 on top."""
    noise = random.Random(0)
    record = rollout(0, 0, noise, 2000)
    record["tokens"] = [f" t{noise.randrange(20000)}" for _ in range(2000)]
    packed = pack_rollout(record, TokenTable())
    assert packed is not None
    assert len(packed.blob) / 2000 < 15

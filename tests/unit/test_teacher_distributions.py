"""What teacher servers can say beside log-probs: known and refused before anything is loaded."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from iwopd.algo.views import Wanted
from iwopd.config import make_config
from iwopd.config.distributions import GIVES, WORDS, DialectName, refusal

ALL = Wanted(entropy=True, top_k=4, chosen=True, states=True)


def teacher(**settings: Any) -> Any:
    return make_config({"models": {"world": "clean"}, "teacher": settings}).teacher


def test_every_dialect_says_what_it_gives_in_names_that_can_be_wanted() -> None:
    assert GIVES.keys() == set(get_args(DialectName))
    assert ALL.names == WORDS.keys()
    assert all(given <= ALL.names for given in GIVES.values())


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_a_kind_of_server_cannot_give_is_refused_with_what_it_can_and_what_would_work(dialect: Any) -> None:
    words = refusal(Wanted(entropy=True, top_k=4).names, dialect)
    assert words is not None
    assert f"teacher.dialect is {dialect!r}" in words
    assert "give log-probs of the written tokens, likeliest ids (top-k), but not entropies" in words
    assert "`iwopd serve-teacher`" in words
    assert "teacher.dialect = 'iwopd'" in words
    assert refusal(Wanted(top_k=4).names, dialect) is None
    assert refusal(ALL.names, "iwopd") is None


def test_the_teacher_that_cannot_is_named() -> None:
    others = {"math": {"urls": ["http://h:2"]}, "code": {"model": "x"}}
    found = teacher(urls=["http://h:1"], dialect="iwopd", others=others).cannot_give(ALL.names)
    assert found is not None
    assert found.startswith("teacher.others.math.dialect is 'vllm'")
    assert "teacher.others.math.model without teacher.others.math.urls" in found
    assert teacher(others={"code": {"model": "x"}}).cannot_give(ALL.names) is None  # local teachers give all

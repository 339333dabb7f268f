"""Horizons that cannot be held are refused before anything is loaded, by name and with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iwopd.config import Config, ConfigError, make_config
from iwopd.rollout.engine import ENGINES, Engine
from iwopd.rollout.horizons import Drift
from iwopd.train.assembly import assemble
from iwopd.train.doctor import examine_recipe
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.lengths import check_horizon
from iwopd.train.horizon import longest_answer, times_read

SERVED = {"urls": ["http://127.0.0.1:9"], "dialect": "vllm"}


def tree(horizon: dict[str, Any], **sections: Any) -> dict[str, Any]:
    rollout = {"max_tokens": 64, "horizon": horizon, **sections.pop("rollout", {})}
    models = {"student": "org/student", "teacher": "org/teacher"}
    return {"models": models, "data": {"prompts": "p.jsonl"}, "rollout": rollout, **sections}


class Deaf(Engine):
    """An engine of another package, from before there were horizons."""


@pytest.mark.parametrize(
    ("horizon", "sections", "words"),
    [
        ({"type": "fixed", "tokens": 65}, {}, r"tokens is 65, longer than an answer can be \(64: rollout\.max_tokens\): lower"),
        ({"type": "growing", "from": 8, "to": 65}, {}, "to is 65, longer than an answer can be"),
        ({"type": "growing", "from": 65}, {}, "from is 65, longer than an answer can be"),
        ({"type": "drift", "block": 65}, {}, "block is 65, longer than an answer can be"),
        (
            {"type": "budget", "tokens": 100},
            {"rollout": {"samples": 2}},
            r"one prompt may take 128 .*raise rollout\.horizon",
        ),
        (
            {"type": "drift"},
            {"rollout": {"engine": "deaf"}},
            r"engine 'deaf' cannot be stopped .*'fixed' or 'growing'",
        ),
        ({"type": "budget", "tokens": 999}, {"rollout": {"engine": "deaf"}}, r"horizon\.type is 'budget', but answers of"),
        ({"type": "drift"}, {"rollout": {"temperature": 0.7}, "teacher": SERVED}, "teacher servers score at temperature 1"),
    ],
)
def test_what_cannot_be_held(monkeypatch: pytest.MonkeyPatch, horizon: Any, sections: Any, words: str) -> None:
    monkeypatch.setitem(ENGINES._items, "deaf", Deaf)
    with pytest.raises(ConfigError, match=words):
        make_config(tree(horizon, **sections))


def test_what_can_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES._items, "deaf", Deaf)
    make_config(tree({"type": "fixed", "tokens": 64}, rollout={"engine": "deaf"}))
    for engine in ("local", "vllm"):
        make_config(tree({"type": "drift"}, rollout={"engine": engine}, teacher=SERVED))


def world(horizon: dict[str, Any], **rollout: Any) -> Config:
    return make_config({"models": {"world": "clean"}, "rollout": {"horizon": horizon, **rollout}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (world({"type": "fixed", "tokens": 81}), "tokens is 81, longer than an answer can be"),
        (world({"type": "budget", "tokens": 150}, samples=2), "one prompt may take 160"),
    ],
)
def test_a_world_says_how_long_answers_are(config: Config, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert longest_answer(config) == 80

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("iwopd.train.assembly.open_world", load)
    with pytest.raises(ConfigError, match=f"rollout.horizon: .*{words}"):
        assemble(config, lambda _: None)
    failed = [one for one in examine_recipe(config, tmp_path) if one.level == "fail"]
    assert [one.check for one in failed] == ["horizon"]
    assert words in failed[0].message
    assert failed[0].remedy.endswith("rollout.horizon.tokens")


def found(config: Config, folder: Path) -> list[Finding]:
    return list(check_horizon(Case(config, {}, longest_answer(config), folder)))


def test_the_doctor_says_what_looks_cost(tmp_path: Path) -> None:
    assert found(world({"type": "full"}), tmp_path) == []
    (once,) = found(world({"type": "drift"}), tmp_path)
    assert (once.level, "each token once" in once.message) == ("pass", True)
    served = make_config(tree({"type": "drift"}, teacher=SERVED))
    (again,) = found(served, tmp_path)
    assert again.level == "warn"
    assert "servers of dialect 'vllm' (teacher) read all of an answer again at every look" in again.message
    assert "teacher.dialect = 'iwopd'" in again.remedy
    for dialect in ("iwopd", "sglang"):
        (once,) = found(make_config(tree({"type": "drift"}, teacher={**SERVED, "dialect": dialect})), tmp_path)
        assert once.level == "pass"


def test_how_often_tokens_are_read() -> None:
    """Looks at 8, 16 and 24 of 32 tokens, after a prompt of 10: 18 + 26 + 34 + 42 tokens instead of 42."""
    assert times_read(Drift(), 10, 32) == pytest.approx((18 + 26 + 34 + 42) / 42)
    assert times_read(Drift(block=32), 10, 32) == 1
    assert times_read(Drift(), 0, 16384) < 10  # blocks grow

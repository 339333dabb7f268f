"""No test gives up because a machine is busy: whoever waits for a process, a thread or a page takes `waiting.PATIENCE`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ELSEWHERE = {"hostile", "vllm", "real", "gpu"}
"""Programs to be run, and tests that are no part of `make test`."""
WAITING = {"wait": 0, "join": 0, "communicate": 0, "finish": 0, "wait_for": 1}
"""Methods that wait, and at which place they take their limit."""
STARTING = ("run", "check_call", "check_output", "run_alone", "run_together")
SHORTEST = 1.0
"""Seconds. What waits for less looks again and again, or wants the limit to be met."""


def impatient(text: str) -> Iterator[tuple[int, float]]:
    """Line and limit of every wait that a number bounds."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in WAITING and name not in STARTING:
            continue
        limits = [given.value for given in node.keywords if given.arg in ("timeout", "seconds")]
        limits += node.args[WAITING[name] :][:1] if name in WAITING else []
        for limit in limits:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value >= SHORTEST:
                yield node.lineno, limit.value


def test_no_wait_is_bounded_by_a_number() -> None:
    files = (path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in ELSEWHERE | {"vllm_support.py"})
    found = [f"{path.relative_to(TESTS)}:{line}: {limit:g}" for path in files for line, limit in impatient(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "text",
    ["process.wait(30)", "thread.join(500)", "job.wait_for(done, 120)", "run([], timeout=300)", "run_alone([], seconds=60)"],
)
def test_numbers_are_found(text: str) -> None:
    assert len(list(impatient(text))) == 1

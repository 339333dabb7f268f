"""What is said without a terminal while long work goes on."""

from __future__ import annotations

import pytest

from iwopd.stages import ConsoleStages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("iwopd.stages.time.monotonic", lambda: now[0])
    return now


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


def test_the_first_short_answers_do_not_tell_how_long_the_others_take(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A thousand answers side by side: two that end early are no reason to announce a day."""
    shown = ConsoleStages()
    shown.stage("answers", 1000)
    clock[0] = 170.0
    shown.advance(2, tokens=60_000)
    assert said(capsys) == "answers: 2/1000, 353 tok/s, 3 min so far"
    clock[0] = 200.0
    shown.advance(298, tokens=10_000)
    assert said(capsys) == "answers: 300/1000, 350 tok/s, about 8 min left"


def test_what_is_done_one_after_the_other_tells_it_at_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = ConsoleStages()
    shown.stage("gradients", 46)
    clock[0] = 10.0
    shown.advance(1)
    assert said(capsys) == "gradients: 1/46, about 8 min left"


def test_what_was_there_already_does_not_count_as_fast(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = ConsoleStages()
    shown.stage("answers", 100, done=90)
    assert said(capsys) == "answers: 90 of 100 were there already"
    clock[0] = 10.0
    shown.advance(5, tokens=100)
    assert said(capsys) == "answers: 95/100, 10 tok/s, about 10 s left"

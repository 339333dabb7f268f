"""A job whose machine has left ends, even if verl waits for ever. Real machines leave in tests/cluster/test_nodes.py."""

from __future__ import annotations

import threading

import pytest

from iwopd.cluster.verl import machines
from waiting import PATIENCE


class Leaving(machines.Machines):
    """Answers as given, one after the other; the last one stays."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked = 0

    def gone(self) -> list[str]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_job_that_does_not_notice_is_ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Ray's errors and a machine that is back in time are no reason."""
    monkeypatch.setattr(machines, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(machines, "NOTICE_SECONDS", 0.05)
    left, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    found = Leaving([], ["10.0.0.9"], [], RuntimeError("Ray is busy"), ["10.0.0.3"])
    machines.watch(found, leave)
    assert left.wait(PATIENCE)
    assert codes == [2]
    said = "the machine 10.0.0.3 left the Ray cluster while the job ran: it died, or its network did"
    assert capfd.readouterr().err == f"iwopd: {said}\n"


def test_several() -> None:
    assert "the machines 10.0.0.3, 10.0.0.4 left the Ray cluster" in str(machines.left(["10.0.0.3", "10.0.0.4"]))

"""A step's rollouts are all there, or the run ends. Dead actors are looked for in tests/cluster, with real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from iwopd.cluster.verl import watch
from iwopd.cluster.verl.errors import VerlError


class Buffer:
    """As much of a replay buffer as the watch touches: it hands out what was put in."""

    def __init__(self, found: int) -> None:
        self.found = found
        self.polls = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if not self.found:
            raise RuntimeError("Sync replay buffer selected terminal groups with no materializable trajectories.")
        return SimpleNamespace(keys=[f"{row}_0_0" for row in range(self.found)]), {"seen": batch_size}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.polls += 1
        return last_debug_time + 1


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.0)


def watched(found: int, samples: int = 2) -> Buffer:
    buffer = Buffer(found)
    watch.Watch(buffer, dict, samples)
    return buffer


def test_a_whole_batch_passes() -> None:
    batch, metrics = watched(16).sample(global_steps=3, partition_id="train", batch_size=8)
    assert len(batch.keys) == 16
    assert metrics == {"seen": 8}


@pytest.mark.parametrize(("found", "lost"), [(15, 1), (0, 16)])
def test_missing_rollouts_end_the_run(found: int, lost: int) -> None:
    with pytest.raises(VerlError, match=rf"step 3: {lost} of 16 rollouts failed"):
        watched(found).sample(global_steps=3, partition_id="train", batch_size=8)


def test_validation_may_miss_some() -> None:
    batch, _ = watched(5).sample(global_steps=3, partition_id="val", batch_size=8)
    assert len(batch.keys) == 5


class BrokenBuffer(Buffer):
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        raise RuntimeError("the queue is gone")


def test_other_errors_stay_what_they_are() -> None:
    buffer = BrokenBuffer(1)
    watch.Watch(buffer, dict, 1)
    with pytest.raises(RuntimeError, match="the queue is gone"):
        buffer.sample(global_steps=1, partition_id="train", batch_size=1)


def test_polls_pass_through() -> None:
    buffer = watched(1)
    assert buffer._wait_for_next_poll("train", 4.0) == 5.0
    assert buffer.polls == 1

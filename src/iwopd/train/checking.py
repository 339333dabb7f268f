"""Rollouts are judged while others are still being written, in threads that wait for worker processes (math, code) or compute.

Whatever goes wrong costs the reward of one rollout and nothing else: a check that raises, or has not returned in time, gives no
verdict. A thread cannot be ended, so one that hangs is left behind and another takes its place.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from iwopd.background import in_background
from iwopd.types import Rollout

MOST_HANGING = 8
"""Checks of one step that may hang before the rest of its rollouts is given up: nobody waits for each of a thousand."""


class Judged(NamedTuple):
    """What a checker said of one rollout."""

    reward: float
    """In [0, 1]; NaN: no verdict."""
    failure: str = ""
    """Why the checker gave no verdict; empty: it gave one, or was not asked."""


Judge = Callable[[Rollout], Judged]


class Checking:
    """The checks of one step, under way beside the main thread."""

    def __init__(self, judge: Judge, *, workers: int, timeout: float) -> None:
        """`timeout`: seconds of one check."""
        self._judge, self._timeout = judge, timeout
        self._waiting: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._places: set[int] = set()
        self._began: dict[int, float] = {}
        self._judged: dict[int, Judged] = {}
        self._hanging = 0
        for _ in range(workers):
            in_background(self._work)

    def add(self, place: int, rollout: Rollout) -> None:
        """A finished rollout and its place among all."""
        with self._changed:
            self._places.add(place)
        self._waiting.put((place, rollout))

    def close(self) -> None:
        """No more will come."""
        self._waiting.put(None)

    def judged(self) -> list[Judged]:
        """What was said of all rollouts, in the order of their places; waits for it."""
        with self._changed:
            while missing := self._places - self._judged.keys():
                now = time.monotonic()
                deadlines = {place: self._began[place] + self._timeout for place in missing if place in self._began}
                late = [place for place, deadline in deadlines.items() if deadline <= now]
                for place in late:
                    self._give_up(place)
                if not late:
                    self._changed.wait(min(deadlines.values()) - now if deadlines else None)
            return [self._judged[place] for place in sorted(self._places)]

    def _give_up(self, place: int) -> None:
        """One that hangs; after too many of them, all that are left."""
        self._hanging += 1
        self._judged[place] = Judged(math.nan, f"no verdict within {self._timeout:g} s (reward.timeout)")
        if self._hanging < MOST_HANGING:
            in_background(self._work)
            return
        why = f"not checked, because {self._hanging} checks of the step took longer than {self._timeout:g} s (reward.timeout)"
        for left in self._places - self._judged.keys():
            self._judged[left] = Judged(math.nan, why)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            place, rollout = item
            with self._changed:
                if place in self._judged:
                    continue
                self._began[place] = time.monotonic()
                self._changed.notify_all()
            try:
                found = self._judge(rollout)
            except BaseException as error:  # of somebody else's code: whatever it is, the place must be filled
                found = Judged(math.nan, f"{type(error).__name__}: {error}")
            with self._changed:
                if place in self._judged:
                    return  # it was given up, and another thread does this one's work
                self._judged[place] = found
                self._changed.notify_all()
        self._waiting.put(None)  # for the next thread

"""The servers of one teacher: requests go to a free one, and one that fails is left alone for a while."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

FIRST_REST = 0.25
LONGEST_REST = 15.0
_jitter = random.Random()  # not the global one: its state belongs to training, and to checkpoints


class Replica:
    """One server. It is kept between calls, so a server that was down in the last step is not tried first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = 0
        """Requests answered so far."""
        self._failures = 0
        self._resting_until = 0.0
        self._told = False
        self._silent: tuple[float, str] | None = None
        """Since when it does not answer, and why."""

    @property
    def silent(self) -> bool:
        """Whether it did not answer when it was asked last."""
        return self._silent is not None

    @property
    def state(self) -> str:
        """In words."""
        if self._silent is None:
            return f"{self.url} answers" if self.answered else f"{self.url} was not asked yet"
        since, why = self._silent
        return f"{self.url} does not answer ({why}) for {time.monotonic() - since:.0f} s, trying again"

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._resting_until

    async def rested(self) -> None:
        """Wait until it may be tried again; with jitter, so that not all waiters come at once."""
        while self.resting:
            left = self._resting_until - time.monotonic()
            await asyncio.sleep(max(0.0, left) * _jitter.uniform(1.0, 1.25) + 0.001)

    def failed(self, why: str, notify: Callable[[str], None]) -> None:
        """Back off: twice as long after every failure, with jitter. Failures of concurrent requests count once."""
        if self.resting:
            return
        self._failures += 1
        self._silent = (time.monotonic() if self._silent is None else self._silent[0], why)
        rest = min(LONGEST_REST, FIRST_REST * 2 ** min(self._failures - 1, 30))
        self._resting_until = time.monotonic() + rest * _jitter.uniform(0.5, 1.0)
        if self._failures == 3:  # do not report a brief failure
            self._told = True
            notify(f"the teacher at {self.url} does not answer ({why}); retrying")

    def worked(self, notify: Callable[[str], None]) -> None:
        self.answered += 1
        if self._told:
            notify(f"the teacher at {self.url} answers again")
        self._failures, self._resting_until, self._told, self._silent = 0, 0.0, False, None

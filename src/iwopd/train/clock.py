"""Wall time by stage."""

from __future__ import annotations

import time


class Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The stage `name` ends now; the next one begins."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

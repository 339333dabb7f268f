"""A rollout server that was away may have been started again, and then has its first weights instead of the student's."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Restarts:
    """Brings the weights of the step once more before anything is asked of a server that was away. Threads may share it."""

    def __init__(self, bring: Callable[[], None]) -> None:
        self._bring = bring
        self._lock = threading.Lock()
        self._doubtful = False

    def was_away(self) -> None:
        """An attempt failed: nobody knows what the server has when it answers again."""
        self._doubtful = True

    def make_sure(self) -> None:
        """Returns when the server has the weights of the step; waits for one that is away."""
        if not self._doubtful:
            return
        with self._lock:
            if self._doubtful:
                self._doubtful = False  # first: whatever fails from now on raises a new doubt
                try:
                    self._bring()
                except BaseException:
                    self._doubtful = True
                    raise

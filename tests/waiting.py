"""Waiting on a machine that may be busy: a test fails because something never comes, not because it comes late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 900.0
"""Seconds for what takes seconds on a free machine; whoever waits longer waits in vain."""


def wait_until(condition: Callable[[], T], what: str = "it", seconds: float = PATIENCE) -> T:
    """What `condition` returns once that is true; asked again and again."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.01)
    return found

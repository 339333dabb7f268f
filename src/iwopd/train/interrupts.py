"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts(acknowledge: Callable[[], None]) -> Iterator[list[int]]:
    """The signals received: the first asks for a stop after the step, a second Ctrl-C a second later stops at once.

    `acknowledge` is called at the first, inside the signal's handler: it must not print or wait for a lock.
    """
    received: list[int] = []
    times: list[float] = []

    def note(number: int, _: FrameType | None) -> None:
        times.append(time.monotonic())
        # Launchers may pass one Ctrl-C on twice, so a second one counts only after a moment.
        if received and number == signal.SIGINT and times[-1] - times[0] > 1.0:
            raise KeyboardInterrupt
        if not received:
            acknowledge()
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

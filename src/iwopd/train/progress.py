"""Progress of pretraining an embedded world, for whoever waits at the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from iwopd import tiny

PretrainingListener = tiny.PretrainingListener


@contextmanager
def pretraining_progress() -> Iterator[PretrainingListener]:
    """A callback that shows how far the models of a world are: in place on a terminal, a line every ten seconds elsewhere."""
    state: dict[str, tuple[int, int, float]] = {}
    last = [0.0]
    terminal = sys.stderr.isatty()

    def report(stage: str, step: int, total: int, loss: float) -> None:
        state[stage] = (step, total, loss)
        now = time.monotonic()
        finished = all(done == of for done, of, _ in state.values())
        if now - last[0] < (0.2 if terminal else 10.0) and not finished:
            return
        last[0] = now
        text = "   ".join(f"{name} {done}/{of} (loss {value:.3f})" for name, (done, of, value) in state.items())
        start, end = ("\r", "") if terminal else ("", "\n")
        print(f"{start}training the world's models: {text}", end=end, file=sys.stderr, flush=True)

    yield report
    if state and terminal:
        print(file=sys.stderr)

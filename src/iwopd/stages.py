"""Long work in stages, and how far it is: a bar per stage on a terminal, else a line now and then. All of it goes to stderr."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 2.0
"""Stages that take no longer than this say nothing without a terminal."""
LINE_SECONDS = 5.0
"""Between two lines."""
EARLY = 0.25
"""Answers are written side by side: until this share of them is finished, their pace says nothing about the rest."""
REDRAW_SECONDS = 0.1
"""Between two changes of a bar: whoever works may report every token."""


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.2 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def rate(tokens: float, seconds: float) -> str:
    """`160 tok/s`; of a slow machine `0.31 tok/s`, not 0. Empty: nothing was measured."""
    if not tokens > 0 or not seconds > 0:
        return ""
    speed = tokens / seconds
    return f"{speed:,.0f} tok/s" if speed >= 10 else f"{speed:.2g} tok/s"


class StageListener:
    """Hears which stage begins, how much of it was there already, and how much more is done. This one says nothing."""

    def stage(self, name: str, total: int, done: int = 0) -> None: ...
    def advance(self, count: int, tokens: int = 0) -> None: ...
    def say(self, text: str) -> None: ...


class ConsoleStages(StageListener):
    """Shows stages; where tokens are counted, also tokens per second. A stage in which nothing advances shows its seconds."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = console.is_terminal
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        times = (TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TimeRemainingColumn())
        self.bars = Progress(*columns, *times, console=console)
        self.name, self.total, self.done, self.fresh, self.tokens = "", 0, 0, 0, 0
        self.began = self.drawn = self.said = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self.live:
            self.bars.start()
        else:
            threading.Thread(target=self._follow, name="iwopd-stages", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self.live:
            self.bars.stop()

    def stage(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self.fresh = self.tokens = 0
        self.began = self.drawn = time.monotonic()
        self.said = self.began + QUIET_SECONDS - LINE_SECONDS
        if self.live:
            self.bar = self.bars.add_task(name, total=total, completed=done, rate="")
        elif done:
            self._say(f"{done} of {total} were there already")

    def advance(self, count: int, tokens: int = 0) -> None:
        self.done, self.fresh, self.tokens = self.done + count, self.fresh + count, self.tokens + tokens
        now = time.monotonic()
        if not self.live:
            self._tell(now)
        elif self.done >= self.total or now - self.drawn > REDRAW_SECONDS:
            self.bars.update(self.bar, completed=self.done, rate=rate(self.tokens, now - self.began))
            self.drawn = now

    def _follow(self) -> None:
        while not self._over.wait(1.0):
            self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        """A line, if there was none for a while and the stage is not over."""
        if now - self.said <= LINE_SECONDS or self.done >= self.total:
            return
        self.said, seconds = now, now - self.began
        waiting = self.total - self.done
        told = self.fresh > 0 and (not self.tokens or self.fresh >= EARLY * (self.fresh + waiting))
        left = f"about {duration(seconds / self.fresh * waiting)} left" if told else ""
        words = (f"{self.done}/{self.total}", rate(self.tokens, seconds), left or f"{duration(seconds)} so far")
        self._say(", ".join(word for word in words if word))

    def say(self, text: str) -> None:
        """A line of its own, above the bars."""
        if self.live:
            self.bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

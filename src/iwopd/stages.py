"""Long work in stages, and how far it is: a bar per stage on a terminal, else a line now and then. All of it goes to stderr."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 2.0
"""Stages that take no longer than this say nothing without a terminal."""
LINE_SECONDS = 5.0
"""Between two lines."""


class StageListener:
    """Hears which stage begins, how much of it was there already, and how much more is done. This one says nothing."""

    def stage(self, name: str, total: int, done: int = 0) -> None: ...
    def advance(self, count: int, tokens: int = 0) -> None: ...


class ConsoleStages(StageListener):
    """Shows stages; where tokens are counted, also tokens per second."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = console.is_terminal
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self.bars = Progress(*columns, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=console)

    def __enter__(self) -> Self:
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.bars.stop()

    def stage(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self.fresh = self.tokens = 0
        self.began = time.monotonic()
        self.said = self.began + QUIET_SECONDS - LINE_SECONDS
        if self.live:
            self.bar = self.bars.add_task(name, total=total, completed=done, rate="")
        elif done:
            self._say(f"{done} of {total} were there already")

    def advance(self, count: int, tokens: int = 0) -> None:
        self.done, self.fresh, self.tokens = self.done + count, self.fresh + count, self.tokens + tokens
        now = time.monotonic()
        seconds = now - self.began
        rate = f"{self.tokens / seconds:.0f} tok/s" if self.tokens and seconds > 0 else ""
        if self.live:
            self.bars.update(self.bar, advance=count, rate=rate)
        elif now - self.said > LINE_SECONDS:
            left = f"about {seconds / self.fresh * (self.total - self.done):.0f} s left"
            self._say(", ".join(word for word in (f"{self.done}/{self.total}", rate, left) if word))
            self.said = now

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

"""What a run is doing at this moment: whoever works says so here, and a display reads it from a thread of its own."""

from __future__ import annotations

import time

from iwopd.stages import StageListener, duration, rate

TITLES = {
    "rollout": "the student writes answers",
    "teacher": "the models score them",
    "signal": "weights",
    "update": "the update",
}
"""Stages of a step, as `metrics.jsonl` calls them, in words."""
WORLD = "training the world's models, once"
LONG = 5.0
"""Seconds from which it is worth saying how long a stage took the last time."""


class Activity(StageListener):
    """The stage under way. Nothing here is locked: a display may see a number that is a moment old."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The training step under way; None: before the first, or between two."""
        self.stopping = False
        """Somebody has asked for a stop after this step."""
        self.processes = 1
        """That share the work; this one sees its own part."""
        self._taken: dict[str, float] = {}
        """Seconds of each stage, the last time."""
        self.detail = ""
        """More about the stage, in words."""
        self._models: dict[str, str] = {}
        self.name, self.total, self.done, self.tokens, self.began = "", 0, 0, 0, time.monotonic()

    def stage(self, name: str, total: int = 0, done: int = 0) -> None:
        """A stage begins, and the one before has ended; of a step, or in words of its own."""
        now = time.monotonic()
        self._taken[self.name] = now - self.began
        self.name, self.total, self.done, self.tokens, self.began = name, total, done, 0, now
        self.detail = ""

    def expect(self, total: int) -> None:
        """So many answers are to be worked on in this stage, by all processes."""
        self.total = -(-total // self.processes)

    def advance(self, count: int, tokens: int = 0) -> None:
        self.done, self.tokens = self.done + count, self.tokens + tokens

    def pretraining(self, model: str, step: int, total: int, loss: float) -> None:
        """A `tiny.PretrainingListener`: the models of an embedded world are trained when it is used for the first time."""
        if self.name != WORLD:
            self.stage(WORLD)
        self._models[model] = f"{model} {step}/{total} (loss {loss:.3f})"
        self.detail = ", ".join(self._models.values())

    def scored(self, count: int) -> None:
        """A teacher may score answers while others are still being written: that stage counts its own."""
        if self.name == "teacher":
            self.advance(count)

    @property
    def seconds(self) -> float:
        """Of this stage, so far."""
        return time.monotonic() - self.began

    def words(self) -> str:
        """`the student writes answers: 12 of 64, 3,120 tokens, 160 tok/s, 20 s`; empty: nothing is under way."""
        name, seconds = self.name, self.seconds
        if not name:
            return ""
        parts = [self.detail] if self.detail else []
        parts += [f"{self.done:,} of {self.total:,}"] if 0 < self.done <= self.total else []
        if self.tokens:
            parts += [f"{self.tokens:,} tokens", rate(self.tokens, seconds)]
        parts.append(duration(seconds))
        before = self._taken.get(name, 0.0) if name in TITLES else 0.0
        last = f" (last step: {duration(before)})" if before > LONG else ""
        return f"{TITLES.get(name, name)}: {', '.join(part for part in parts if part)}{last}"

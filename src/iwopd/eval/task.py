"""What a task is: problems, a checker, and how many samples of which kind its protocol asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from iwopd.types import Prompt


@dataclass(frozen=True)
class Verdict:
    """What a checker says about one answer."""

    status: str
    """`correct`, `wrong`, `timeout`, `unparsed`; for code `pass`, `fail`, `timeout`, `error`."""
    score: float
    """1 is right, 0 is not. A timeout is 0 and stays visible as a timeout."""
    answer: str | None = None
    """The answer as it counts in a majority vote; None where there is none to count."""
    detail: str = ""
    """Why, in a few words."""


class Checker(Protocol):
    """Judges answers in the order in which they come."""

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]: ...


@dataclass(frozen=True)
class Task:
    """Problems and how to tell a right answer."""

    name: str
    prompts: Sequence[Prompt]
    check: Checker
    samples: int = 1
    """Samples a problem in the task's own protocol."""
    temperature: float = 1.0
    """0: greedy."""
    max_tokens: int = 16384
    """Longest answer."""

    @property
    def aggregate(self) -> str:
        return "pass@1" if self.temperature == 0 else f"mean@{self.samples}"


def one_by_one(check: Callable[[Prompt, str], bool]) -> Checker:
    """A checker from a function that knows right from wrong."""

    def judge(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        right = [check(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return [Verdict("correct", 1.0) if good else Verdict("wrong", 0.0) for good in right]

    return judge


def outcomes(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How often each status occurred."""
    return dict(sorted(Counter(verdict.status for verdict in verdicts).items()))

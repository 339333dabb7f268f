"""A task: problems, a checker, and the sampling protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from iwopd.types import Prompt


@dataclass(frozen=True)
class Verdict:
    """A checker's verdict on one answer."""

    status: str
    """`correct`, `wrong`, `timeout`, `unparsed`; for code `pass`, `fail`, `timeout`, `error`."""
    score: float
    """1 is right, 0 is not. A timeout is 0 and stays visible as a timeout."""
    answer: str | None = None
    """The answer as it counts in a majority vote; None if it does not vote."""
    detail: str = ""
    """The reason, in a few words."""
    judged: bool = True
    """False: the checker could not tell, and the answer is not to blame. In an accuracy it counts as not right; as a reward in
    training it counts as nothing."""


class Checker(Protocol):
    """Judges answers, in their order."""

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]: ...


@dataclass(frozen=True)
class Task:
    """Problems and how to tell a right answer."""

    name: str
    prompts: Sequence[Prompt]
    check: Checker
    samples: int = 1
    """Samples per problem in the task's own protocol."""
    temperature: float = 1.0
    """0: greedy."""
    max_tokens: int = 16384
    """Longest answer."""
    sandbox: str = ""
    """In what generated programs are run, in words that are recorded; empty if none are run."""

    @property
    def aggregate(self) -> str:
        return "pass@1" if self.temperature == 0 else f"mean@{self.samples}"


def one_by_one(check: Callable[[Prompt, str], bool]) -> Checker:
    """A checker from a function that judges one answer."""

    def judge(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        right = [check(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return [Verdict("correct", 1.0) if good else Verdict("wrong", 0.0) for good in right]

    return judge


def outcomes(statuses: Iterable[str]) -> dict[str, int]:
    """How often each status occurred."""
    return dict(sorted(Counter(statuses).items()))

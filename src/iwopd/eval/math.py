r"""Is the boxed answer of a completion equal to the gold answer?

    check_math(r"... so it is \boxed{\frac{1}{2}}.", "0.5").status    # "correct"

The last box is taken (`boxed.py`) and compared with the gold by math-verify in a worker process (`workers.py`). A status is

- `correct`;
- `wrong`: both were parsed, and they differ;
- `unparsed`: no answer, or answer or gold cannot be parsed (for the gold, the detail says GOLD);
- `timeout`: no verdict within the limits of time, memory and depth.

The last two count as not right in an accuracy, but are not `wrong`; an evaluation should show how many there are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Literal, cast

from iwopd.eval.boxed import last_boxed
from iwopd.eval.workers import WorkerPool, in_parallel, shared_pool

Status = Literal["correct", "wrong", "timeout", "unparsed"]

TIMEOUT_SECONDS = 3.0
"""CPU time for one comparison, a hundred times that of a typical one."""

LONGEST_ANSWER = 20_000
"""Characters; the text around the box may have any length."""

_INTEGER = re.compile(r"-?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)")


@dataclass(frozen=True)
class MathOutcome:
    """The verdict on one completion."""

    status: Status
    answer: str | None
    """The content of the last box, unchanged; None if there is no answer."""

    detail: str
    """Why, in one sentence."""


def check_math(text: str, gold: str, *, timeout: float = TIMEOUT_SECONDS) -> MathOutcome:
    """Compare the last box of `text` with `gold`, which is bare LaTeX without box and dollars. Safe from any thread.

    `timeout` is in seconds of CPU time; in wall time a check may take more than ten times as long before it is ended.
    """
    _require_timeout(timeout)
    answer, outcome = _without_worker(text, gold)
    return outcome or _ask(shared_pool(), answer, gold, timeout)


def check_math_many(
    pairs: Iterable[tuple[str, str]],
    *,
    timeout: float = TIMEOUT_SECONDS,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[MathOutcome]:
    """`check_math` for many (text, gold), in order, with `workers` processes at a time (None: one per core).

    Pairs with the same answer and gold are compared once. `progress(done, all)` is called in the calling thread.
    """
    _require_timeout(timeout)
    texts = list(pairs)
    outcomes: dict[int, MathOutcome] = {}
    waiting: dict[tuple[str, str], list[int]] = {}
    for index, (text, gold) in enumerate(texts):
        answer, outcome = _without_worker(text, gold)
        if outcome is None:
            waiting.setdefault((answer, gold), []).append(index)
        else:
            outcomes[index] = outcome
    if progress is not None:
        progress(len(outcomes), len(texts))
    if waiting:
        pool = shared_pool() if workers is None else WorkerPool(workers)
        asked = list(waiting)
        try:
            for place, outcome in in_parallel(lambda pair: _ask(pool, *pair, timeout), asked, pool.size):
                outcomes.update(dict.fromkeys(waiting[asked[place]], outcome))
                if progress is not None:
                    progress(len(outcomes), len(texts))
        finally:
            if workers is not None:
                pool.close()
    return [outcomes[index] for index in range(len(texts))]


def _without_worker(text: str, gold: str) -> tuple[str, MathOutcome | None]:
    """The answer, and the outcome if it needs no symbolic comparison."""
    for name, value in (("text", text), ("gold", gold)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, got {type(value).__name__} {value!r:.40}")
    boxed = last_boxed(text)
    if boxed.answer is None:
        return "", MathOutcome("unparsed", None, boxed.why)
    answer = boxed.answer

    def outcome(status: Status, detail: str) -> tuple[str, MathOutcome]:
        return answer, MathOutcome(status, answer, detail)

    if not gold.strip():
        return outcome("unparsed", "the GOLD answer is empty")
    if answer.split() == gold.split():  # any notation, known to math-verify or not: \text{Tuesday}, 10:00 p.m.
        return outcome("correct", "the same text")
    if (given := _integer(answer)) is not None and (right := _integer(gold)) is not None:
        return outcome("correct", "the same integer") if given == right else outcome("wrong", "different integers")
    if last_boxed(gold).answer is not None:
        return outcome("unparsed", r"the GOLD has a \boxed{} around it; pass the bare LaTeX inside")
    for whose, value in (("GOLD", gold), ("answer", answer)):
        if len(value) > LONGEST_ANSWER:
            return outcome("unparsed", f"the {whose} has {len(value)} characters; at most {LONGEST_ANSWER} are compared")
        if (place := _unprintable(value)) is not None:
            what = f"the control character U+{ord(value[place]):04X} at position {place}"
            return outcome("unparsed", f"the {whose} has {what}{_LOST_BACKSLASH.get(value[place], '')}")
    return answer, None


_LOST_BACKSLASH = {
    character: rf": was a backslash lost, as in {command}?"
    for character, command in {"\x07": r"\alpha", "\x08": r"\binom", "\x0b": r"\vec", "\x0c": r"\frac"}.items()
}


def _integer(text: str) -> str | None:
    """A plain integer in canonical form: 007 and 7, -0 and 0, 1,000 and 1000 are the same."""
    if _INTEGER.fullmatch(text.strip()) is None:
        return None
    digits = text.strip().lstrip("-").replace(",", "").lstrip("0")
    return ("-" if text.strip().startswith("-") and digits else "") + (digits or "0")


def _unprintable(text: str) -> int | None:
    """Where the first lone surrogate is, or control character other than white space."""
    unwanted = (i for i, c in enumerate(text) if c not in "\t\n\r" and unicodedata.category(c) in ("Cc", "Cs"))
    return next(unwanted, None)


def _require_timeout(timeout: float) -> None:
    if not (isfinite(timeout) and timeout > 0.0):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")


def _ask(pool: WorkerPool, answer: str, gold: str, timeout: float) -> MathOutcome:
    status, detail = pool.check(answer, gold, timeout)
    return MathOutcome(cast(Status, status), answer, detail)

"""Check a program: run it on inputs in a sandbox, and compare its results with the expected ones outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from iwopd.eval.sandbox import probe, wire
from iwopd.eval.sandbox.run import Digest, End, Program, Report, SandboxError, run
from iwopd.eval.sandbox.unbuilt import Bag, Ratio, Related, built
from iwopd.eval.workers import in_parallel

__all__ = ["CodeJob", "CodeOutcome", "SandboxError", "Status", "check_code", "check_code_many", "same"]

Status = Literal["pass", "fail", "timeout", "error"]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
FLOAT_ATOL, RTOL = 1e-6, 1e-7
"""EvalPlus's absolute tolerance (if floats are expected and the problem sets none) and relative tolerance."""


@dataclass(frozen=True)
class CodeOutcome:
    """`pass`: every test returned what was expected. Otherwise the first failing test: `fail` returned another value,
    `error` raised, crashed or could not be loaded, `timeout` took too long.
    """

    status: Status
    detail: str
    """Why it did not pass; empty when it did."""
    passed: int
    """Tests passed before the first that failed; the rest are not run."""
    total: int
    seconds: float
    """CPU time of the program."""


@dataclass(frozen=True)
class CodeJob:
    """The arguments of one `check_code`."""

    source: str
    entry_point: str
    tests: Sequence[tuple[Sequence[Any], Any]]
    timeout: float = 10.0
    atol: float = 0.0


def check_code(
    source: str,
    entry_point: str,
    tests: Sequence[tuple[Sequence[Any], Any]],
    *,
    timeout: float = 10.0,
    atol: float = 0.0,
    unsafe: bool = False,
    backend: str | None = None,
) -> CodeOutcome:
    """Check what `entry_point` of the program `source` returns. Safe to call from any thread.

    `tests`: pairs of positional arguments and the expected result, both plain data (None, bool, int, float, complex, str,
    bytes, list, tuple, set, frozenset, dict). Results compare by `==`; where floats are expected, within 1e-6 absolute and
    1e-7 relative; with `atol`, numbers within that. `timeout`: seconds of CPU time for all tests together, and of
    sleeping at a stretch. `unsafe` runs the program without a sandbox if none works; `backend` names one.
    """
    chosen = probe.choose(unsafe=unsafe, name=backend)
    arguments, expected = _encoded(tests)
    if not (math.isfinite(timeout) and timeout > 0.0):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    judge = Judge(lambda index, value: same(value, expected[index], atol))
    job = Program(source, entry_point, arguments, [timeout] * len(arguments), timeout)
    return judge.outcome(run(job, chosen, judge.receive), len(arguments))


def check_code_many(
    jobs: Sequence[CodeJob],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    unsafe: bool = False,
    backend: str | None = None,
) -> list[CodeOutcome]:
    """The outcome of every job, in order, `workers` at a time (default: one per processor)."""

    def check(job: CodeJob) -> CodeOutcome:
        named: dict[str, Any] = {"timeout": job.timeout, "atol": job.atol, "unsafe": unsafe, "backend": backend}
        return check_code(job.source, job.entry_point, job.tests, **named)

    return check_all(check, jobs, workers, progress)


def check_all(
    check: Callable[[_Item], _Result], items: Sequence[_Item], workers: int | None, progress: Callable[[int, int], None] | None
) -> list[_Result]:
    """The results in order. `progress(done, total)` is called after each."""
    results = {}
    for place, result in in_parallel(check, items, workers):
        results[place] = result
        if progress is not None:
            progress(len(results), len(items))
    return [results[place] for place in range(len(items))]


class Judge:
    """Compares reports as they arrive, and stops at the first wrong one."""

    def __init__(self, right: Callable[[int, Any], bool]) -> None:
        self.right = right
        self.passed = 0
        self.verdict: tuple[Status, str] | None = None

    def receive(self, report: Report) -> bool:
        """Compare one report; whether to continue."""
        if report.error is not None:
            self.verdict = ("error", f"test {report.index + 1}: {report.error}")
        elif not self.right(report.index, report.value):
            shown = "a value too large to show" if isinstance(report.value, Digest) else _shown(report.value)
            self.verdict = ("fail", f"test {report.index + 1}: returned {shown}")
        else:
            self.passed += 1
        return self.verdict is None

    def outcome(self, end: End, total: int) -> CodeOutcome:
        """The outcome; `pass` only if every test was reported and right."""
        if self.verdict is not None:
            status, detail = self.verdict
        elif end.status == "complete" and self.passed == total:
            status, detail = "pass", ""
        else:
            status, detail = "timeout" if end.status == "timeout" else "error", end.detail or end.status
        return CodeOutcome(status, _printable(detail), self.passed, total, end.seconds)


def same(result: Any, expected: Any, atol: float = 0.0) -> bool:
    """EvalPlus's equality: `==`, or numbers within a tolerance if the outer types agree."""
    if isinstance(result, Digest) or isinstance(expected, Digest):
        return _digest(result) == _digest(expected) is not None
    if result == expected:
        return True
    if atol == 0.0 and is_floats(expected):
        atol = FLOAT_ATOL
    return atol != 0.0 and close(result, expected, atol)


def is_floats(value: Any) -> bool:
    """A float, or a list or tuple of floats only."""
    if type(value) in (list, tuple):
        return bool(value) and all(type(item) is float for item in value)
    return type(value) is float


def close(result: Any, expected: Any, atol: float) -> bool:
    """`numpy.allclose` without broadcasting: the program chooses the result's shape."""
    if type(result) is not type(expected) or not _numeric(result):
        return False
    try:
        with np.errstate(all="ignore"):
            ours, theirs = np.asarray(result), np.asarray(expected)
            return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, rtol=RTOL, atol=atol))
    except (TypeError, ValueError, OverflowError):  # not numbers
        return False


def _numeric(value: Any) -> bool:
    """Numbers, and lists and tuples of them. From other values numpy may make arrays of any size."""
    if type(value) in (list, tuple):
        return all(map(_numeric, value))
    return type(value) in (bool, int, float, complex)


def _digest(value: Any) -> bytes | None:
    if isinstance(value, Digest):
        return value.sha256
    try:
        return wire.digest(value)
    except wire.WireError:
        return None


def _encoded(tests: Sequence[tuple[Sequence[Any], Any]]) -> tuple[list[bytes], list[Any]]:
    if not tests:
        raise ValueError("tests is empty: a program cannot pass no tests")
    arguments, expected = [], []
    for number, test in enumerate(tests, 1):
        if not isinstance(test, list | tuple) or len(test) != 2 or not isinstance(test[0], list | tuple):
            raise ValueError(f"test {number} must be (arguments, expected) with a list or tuple of arguments, got {test!r:.80}")
        try:
            arguments.append(wire.encode_plain(list(test[0])))
            wire.encode_plain(test[1])
        except wire.WireError as error:
            raise ValueError(f"test {number}: {error}") from None
        expected.append(test[1])
    return arguments, expected


def _printable(text: str) -> str:
    """Untrusted text without control characters and surrogates."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def _shown(value: Any) -> str:
    """A short form: `repr` could take megabytes, and raises for a long int."""
    kind = type(value)
    if kind is Related:
        return _shown(value.value)
    if kind is Ratio:
        return f"{_shown(value.numerator)} / {_shown(value.denominator)}"
    if kind is int and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    if kind in (str, bytes):
        return repr(value[:60]) + ("…" if len(value) > 60 else "")
    if kind is Bag and value:
        kind, value = value.kind, value.items
    if kind in (list, tuple, set, frozenset, dict) and value:
        first = [_shown(item) for item, _ in zip(value, range(3), strict=False)]
        return f"{kind.__name__} of {len(value)}: {', '.join(first)}{', …' if len(value) > 3 else ''}"[:200]
    return repr(built(value))

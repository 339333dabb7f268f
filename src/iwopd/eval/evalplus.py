"""HumanEval+ and MBPP+ with EvalPlus's data and verdicts (after evalplus 0.3.1), in a sandbox that holds.

EvalPlus stores inputs and a canonical solution; what is expected is what the canonical solution returns. It is run in a
sandbox of its own, never the candidate's, and its outputs are kept in the user's cache.

Where we differ, on purpose:

- HumanEval/32 (`find_zero`): EvalPlus checks the root and then forgets to count the test, so no solution passes. Here the check
  counts. `as_published=True` gives EvalPlus's verdict, for numbers to put beside published ones.
- A tolerance never stretches one shape over another, as numpy would.
- Programs see the standard library only, have 2 GiB, and their limits are in CPU time. docs/evaluation.md has the whole list.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from iwopd.data.sources import SourceError
from iwopd.eval.code import FLOAT_ATOL, CodeOutcome, Judge, check_all, close, is_floats, same
from iwopd.eval.evalplus_problems import CodeProblem
from iwopd.eval.sandbox import probe, wire
from iwopd.eval.sandbox.run import SLEEP_SECONDS, Digest, Program, Report, run
from iwopd.eval.sandbox.unbuilt import Related, built, same_elements

MIN_SECONDS, REFERENCE_FACTOR, MOST_SECONDS = 1.0, 4.0, 60.0
"""EvalPlus's limits: a test may take 4 times as long as the canonical solution, but 1 s in any case; all together 60 s."""
_CANONICAL_SECONDS = 600.0
_CACHE_VERSION = 2


@dataclass(frozen=True)
class CodeVerdict:
    """Both outcomes. EvalPlus's "plus" score asks for both: `passed`."""

    id: str
    base: CodeOutcome
    plus: CodeOutcome

    @property
    def passed(self) -> bool:
        """Passed the original tests and the added ones."""
        return self.base.status == self.plus.status == "pass"


# --- what the canonical solution returns


@dataclass(frozen=True)
class Expected:
    """Outputs of the canonical solution, and the CPU seconds each took."""

    outputs: list[Any]
    seconds: list[float]


def expected_outputs(
    problem: CodeProblem, *, cache: Path | None = None, unsafe: bool = False, backend: str | None = None
) -> tuple[Expected, Expected]:
    """For the base and the plus inputs; from the cache if this problem and this Python have been seen."""
    place = (cache or _cache_folder()) / f"{_fingerprint(problem)}.json"
    if (kept := _from_cache(place, problem)) is not None:
        return kept
    made = tuple(_run_canonical(problem, inputs, unsafe, backend) for inputs in (problem.base_input, problem.plus_input))
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_suffix(f".{os.getpid()}.{id(made)}.tmp")
    unfinished.write_text(json.dumps([_packed(part) for part in made]))
    unfinished.replace(place)
    return made[0], made[1]


def _cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("iwopd")) / "evalplus"


def _fingerprint(problem: CodeProblem) -> str:
    inputs = wire.encode_plain([problem.base_input, problem.plus_input])
    text = "\0".join([str(_CACHE_VERSION), sys.version, problem.id, problem.entry_point, problem.reference])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") + b"\0" + inputs).hexdigest()


def _run_canonical(problem: CodeProblem, inputs: list[Any], unsafe: bool, backend: str | None) -> Expected:
    if not inputs:
        return Expected([], [])
    reports: list[Report] = []

    def receive(report: Report) -> bool:
        reports.append(report)
        return report.error is None

    arguments, limits = [wire.encode_plain(item) for item in inputs], [_CANONICAL_SECONDS] * len(inputs)
    job = Program(problem.reference, problem.entry_point, arguments, limits, _CANONICAL_SECONDS, _CANONICAL_SECONDS)
    end = run(job, probe.choose(unsafe=unsafe, name=backend), receive)
    if end.status != "complete":
        reason = end.detail or (reports[-1].error if reports else end.status)
        raise SourceError(f"{problem.id}: the canonical solution gives no expected outputs: {reason}")
    outputs = [built(report.value) for report in reports]
    if problem.dataset == "mbpp" and problem.entry_point in _NOT_NONE:
        outputs = [output is not None for output in outputs]
    return Expected(outputs, [report.seconds for report in reports])


def _packed(part: Expected) -> dict[str, Any]:
    outputs = [("digest", value.sha256) if isinstance(value, Digest) else ("value", value) for value in part.outputs]
    coded = [base64.b64encode(wire.encode(output, wire.JOB)).decode() for output in outputs]
    return {"outputs": coded, "seconds": part.seconds}


def _from_cache(place: Path, problem: CodeProblem) -> tuple[Expected, Expected] | None:
    """None if there is nothing, or not what it should be: then it is made again."""
    try:
        parts = [Expected(list(map(_unpacked, part["outputs"])), part["seconds"]) for part in json.loads(place.read_text())]
        if [len(part.outputs) for part in parts] == [len(problem.base_input), len(problem.plus_input)]:
            return parts[0], parts[1]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def _unpacked(text: str) -> Any:
    kind, value = wire.decode(base64.b64decode(text, validate=True), wire.JOB)
    return Digest(value) if kind == "digest" else value


# --- verdicts

# Functions whose results stand for a set, whatever their order.
_SET_LIKE = {"similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum"}
_SET_LIKE |= {"intersection_array", "find_dissimilar", "Diff"}
# Functions that may return a match object: only whether there is one counts.
_NOT_NONE = {"check_str", "text_match_three", "text_starta_endb"}


def check_solution(
    problem: CodeProblem,
    source: str,
    *,
    expected: tuple[Expected, Expected] | None = None,
    as_published: bool = False,
    unsafe: bool = False,
    backend: str | None = None,
) -> CodeVerdict:
    """Run the whole program `source` on the problem's base and plus tests, each in a fresh process.

    Both together may sleep 10 s; their CPU time is limited as EvalPlus limits it.
    """
    expected = expected or expected_outputs(problem, unsafe=unsafe, backend=backend)
    chosen = probe.choose(unsafe=unsafe, name=backend)
    outcomes, sleep = [], SLEEP_SECONDS
    for inputs, part in zip((problem.base_input, problem.plus_input), expected, strict=True):
        if not inputs:
            outcomes.append(CodeOutcome("pass", "", 0, 0, 0.0))
            continue
        limits = [max(MIN_SECONDS, REFERENCE_FACTOR * seconds) for seconds in part.seconds]
        total = max(min(MOST_SECONDS, sum(limits)) + 1.0, 2.0 * sum(part.seconds))
        job = Program(source, problem.entry_point, [wire.encode_plain(item) for item in inputs], limits, total, sleep)
        judge = Judge(_Right(problem, inputs, part.outputs, as_published))
        end = run(job, chosen, judge.receive)
        sleep = max(0.0, sleep - end.slept)
        outcomes.append(judge.outcome(end, len(inputs)))
    return CodeVerdict(problem.id, *outcomes)


def check_solutions(
    solutions: Sequence[tuple[CodeProblem, str]],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> list[CodeVerdict]:
    """Verdicts in order, `workers` at a time; `options` are those of `check_solution`."""
    return check_all(lambda solution: check_solution(*solution, **options), solutions, workers, progress)


class _Right:
    """Whether the result of test `index` is right, in order: EvalPlus's tolerance stays once a test needed it."""

    def __init__(self, problem: CodeProblem, inputs: list[Any], outputs: list[Any], as_published: bool) -> None:
        self.problem, self.inputs, self.outputs = problem, inputs, outputs
        self.published = as_published
        self.atol = problem.atol

    def __call__(self, index: int, result: Any) -> bool:
        problem, expected, arguments = self.problem, self.outputs[index], self.inputs[index]
        if problem.dataset == "humaneval" and problem.entry_point == "find_zero":
            root = result.value if isinstance(result, Related) else result
            return not self.published and _is_root(arguments[0], root, self.atol)
        if isinstance(expected, Digest) or isinstance(result, Digest):
            return same(result, expected)
        exact = bool(result == expected)
        if problem.dataset == "mbpp":
            exact = _mbpp_oracle(problem, arguments, result, expected, exact)
        if self.atol == 0.0 and is_floats(expected):
            self.atol = FLOAT_ATOL  # and so for the tests that follow
        return exact or (self.atol != 0.0 and close(result, expected, self.atol))


def _mbpp_oracle(problem: CodeProblem, arguments: list[Any], result: Any, expected: Any, exact: bool) -> bool:
    name = problem.entry_point
    if name == "are_equivalent":  # Mbpp/164: the task does not say what it asks for, so any answer will do
        return True
    if name == "sum_div":  # Mbpp/295: 0 will do as well
        return exact or bool(result == 0)
    if name == "surface_Area":  # Mbpp/581: the height may be the pyramid's instead of its side's
        return exact or (_is_number(result) and abs(result - _pyramid(*arguments)) <= problem.atol)
    if name == "digit_distance_nums":  # Mbpp/558: or digit by digit, the shorter number filled with zeros
        return exact or bool(result == _digit_distance(*arguments))
    if name in _SET_LIKE:
        return same_elements(result.value if isinstance(result, Related) else result, expected)
    if name in _NOT_NONE:
        return bool(result == expected) if isinstance(result, bool) else bool(expected == (result is not None))
    return exact


def _is_root(coefficients: list[Any], x: Any, atol: float) -> bool:
    """HumanEval/32: any zero of the polynomial will do."""
    try:
        return _is_number(x) and abs(sum(c * math.pow(x, power) for power, c in enumerate(coefficients))) <= atol
    except (OverflowError, ValueError):
        return False


def _pyramid(edge: float, height: float) -> int:
    return round(edge * edge + 2 * edge * math.hypot(edge / 2, height))


def _digit_distance(first: Any, second: Any) -> int:
    width = max(len(str(first)), len(str(second)))
    return sum(abs(int(a) - int(b)) for a, b in zip(str(first).zfill(width), str(second).zfill(width), strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)

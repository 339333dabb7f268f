r"""The program of a math worker: reads pairs (answer, gold), compares them with math-verify, writes verdicts.

`workers.py` starts it by its path and not with `-m`, because importing the package would load torch. It imports nothing from
this package. Messages in both directions are four bytes of length and JSON, which escapes everything beyond ASCII, also
lone surrogates.

The rules below are those of math-verify; comments explain the exceptions. math-verify's search for answers in
prose is not used: the whole box is the answer, and a number extracted from an unreadable box would be a guess.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# ---- reading LaTeX ----------------------------------------------------------------------------------------------------------

_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "°": r"^\circ ",
    }
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm "}
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width letters, digits and signs
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", "")  # invisible
)
_GAP = r"(?:\\[,;:! ]|~|\s)+"
_ANSWER_IS = r"(?:(?:so|thus|hence|therefore),?\s++)?(?:the\s++)?(?:final\s++)?answer(?:\s++is|\s++equals)?\s*+:?"
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    # Dollars and brackets around the mathematics of an \fbox, a box inside the box, and the full stop after a sentence.
    (re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]|\\(?:boxed|fbox)(?=\s*\{)"), ""),
    (re.compile(r"(?<=[\d}\)])\s*\.\s*$"), ""),
    # math-verify reads "1\,000" as 1 + 0 (a mixed number), so it would equal "1": join groups of three digits.
    (re.compile(rf"(?<![\d.,_^])(\d{{1,3}})((?:{_GAP}\d{{3}})+)(?![\d,])"), lambda m: m[1] + re.sub(r"\D", "", m[2])),
    # A mixed number with a slash: 1 1/2.
    (re.compile(rf"^(-?\d+){_GAP}(\d+)/(\d+)$"), r"\1\\frac{\2}{\3}"),
    # math-verify breaks \sqrt\pi into \sqrt{\}pi.
    (re.compile(r"\\sqrt\s*(\\[a-zA-Z]+)(?!\s*[{\[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\log_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\})"), r"\\ln "),
    (re.compile(r"\\lg(?![a-zA-Z])"), r"\\log"),
    # Fonts and lines are layout; what they are around stays, in its braces. i and e upright are what they are in italics.
    (re.compile(r"\\(?:boldsymbol|bm|mathbf|mathit|underline|emph|(?:text)?color\s*+\{[a-zA-Z]*+\})(?=\s*\{)"), ""),
    (re.compile(r"\\mathrm\s*+\{\s*+([ie])\s*+\}"), r"\1"),
    (re.compile(r"(?:\\left\s*+)?\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"(?:\\right\s*+)?\\rangle(?![a-zA-Z])"), ")"),
    (re.compile(rf"^\\text\s*+\{{\s*+{_ANSWER_IS}\s*+\}}", re.IGNORECASE), ""),
]
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\{\s*(\d+)\s*\}")
_DOTTED = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\dot\s*+(?:\{(\d+)\}|(\d))(?:(\d*)\\dot\s*+(?:\{(\d)\}|(\d)))?(?![\d\\])")
"""A repeating decimal with dots over the first and the last digit of its period, or over its only one."""
_WORDS = re.compile(r"\\(?:text(?:normal|bf|it|rm)?|mathrm|mbox)\s*+\{([^{}]*+)\}(?:\^\{?\d\}?)?\s*+\.?$")
_LARGE = re.compile(r"(?<=\d)(?:\\[,;:! ]|~|\s)*+(hundred|thousand|million|billion|trillion|dozen)$")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(?<!\d)(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_PERCENT = re.compile(r"(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)$")
_SIDE_BY_SIDE = re.compile(rf"-?\d+(?:\.\d+)?(?:{_GAP}\d+(?:\.\d+)?)+")


class UnreadableError(Exception):
    """No mathematics that math-verify understands; the message is a phrase that follows "the answer"."""


class Reading(NamedTuple):
    value: Any
    """A sympy expression, matrix, set or relation."""

    percent: bool
    """Whether a percent sign followed; the value is the number before the sign."""

    repeated: int
    """Entries of a bare list beyond the different ones: 1 in "5,5", whose value is the set of 5."""


def read(latex: str, also: frozenset[str] | None = None) -> Reading:
    """Parse bare LaTeX. `also`: words of the gold, which are units as well; None: this is the gold."""
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy import nan, zoo

    text = latex.translate(_SIGNS).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _DOTTED.sub(_dotted_decimal, text)
    text = _without_unit(text, also)
    if _TRIGONOMETRIC.search(text):  # as an answer 90^\circ is 90, but \cos 60^\circ is not the cosine of 60
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = text.strip()
    without_sign = _PERCENT.sub("", text).rstrip()
    percent = without_sign != text
    if _SIDE_BY_SIDE.fullmatch(without_sign):
        raise UnreadableError("is numbers side by side, which could mean anything")  # math-verify adds them (1 2 is 3)
    given = {"basic_latex": True, "units": True, "malformed_operators": True, "nits": True, "boxed": "none", "equations": False}
    rules = NormalizationConfig(**given)
    try:
        normal = normalize_latex(without_sign, rules)
        value = parse_latex_cached(normal)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise UnreadableError("is not mathematics that math-verify can read") from error
    if value is None or value is nan or value is zoo:
        raise UnreadableError("has no value (a division by zero?)")
    return Reading(value, percent, _repeated(normal, value))


def _repeating_decimal(match: re.Match[str]) -> str:
    return _repeating(*match.groups())


def _repeating(whole: str, fixed: str, period: str) -> str:
    nines = 10 ** len(period) - 1
    numerator = int((whole + fixed) or "0") * nines + int(period)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * nines}}}"


def _dotted_decimal(match: re.Match[str]) -> str:
    whole, fixed, *period = match.groups()
    return _repeating(whole, fixed, "".join(filter(None, period)))


# Words that say what is counted or measured, in the singular.
_UNITS = frozenset(Path(__file__).with_name("math_units.txt").read_text(encoding="ascii").split())
_NUMBERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def _without_unit(text: str, also: frozenset[str] | None) -> str:
    """The text without a unit at its end, "million" and the like as the number that they are.

    Other words could mean anything ("if n is even, else 7"), so an answer that ends in them is refused; math-verify drops
    everything from the first word on.
    """
    factor = 1
    for _ in range(8):  # "5 \\text{ cm} \\text{ each}"; more than that is no unit
        found = _WORDS.search(text)
        if found is None or not text[: found.start()].strip(" ~\\,;:!"):  # nothing, or the whole text is words
            break
        words = _WORD.findall(_SPACES.sub(" ", found[1].lower()))
        if words in (["and"], ["or"], ["percent"], ["pct"], ["percentage"]):
            break
        if also is not None and not all(word in _NUMBERS or word in also or _is_unit(word) for word in words):
            raise UnreadableError(f"ends in words that are no unit ({found[1].strip()[:40]!r})")
        factor *= math.prod(_NUMBERS.get(word, 1) for word in words)
        text = text[: found.start()].rstrip().removesuffix("\\")  # of a "\\ " before it
    if factor == 1 and (large := _LARGE.search(text)) is not None:
        text, factor = text[: large.start()], _NUMBERS[large[1]]
    return text if factor == 1 else rf"{text}\times {factor}"


_WORD = re.compile(r"[a-z]+|\d+|[^a-z\d\s.,/\\~^*·$-]")  # a bracket is no word and no unit either
_SPACES = re.compile(r"\\[,;:! ]|~")


def _is_unit(word: str) -> bool:
    return word in _UNITS or word.removesuffix("s") in _UNITS or word.removesuffix("es") in _UNITS


def _repeated(text: str, value: Any) -> int:
    """How many entries of a bare list are there more than once."""
    from sympy import FiniteSet

    if not isinstance(value, FiniteSet) or text.lstrip().startswith((r"\{", "{", "(", "[")):
        return 0
    depth, entries = 0, 1
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        entries += sign in ",;" and depth == 0
    return max(0, entries - len(value.args))


# ---- comparing --------------------------------------------------------------------------------------------------------------


def judge(answer: str, gold: str) -> tuple[str, str]:
    """Status and reason."""
    whose, hint = "GOLD", "; only an answer with the same letters would be correct"
    try:
        right = read(gold)
        whose, hint = "answer", ""
        given = read(answer, frozenset(re.findall(r"[a-z]+", gold.lower())))
    except UnreadableError as error:
        return "unparsed", f"the {whose} {error}{hint}"
    # A percent sign on one side only: either reading is accepted, 50 and 0.5. Gold answers to "what percent" come with and
    # without the sign, and a probability may be stated as a percentage. With a sign on both sides or none, values must agree.
    given_values = [given.value, given.value / 100] if given.percent and not right.percent else [given.value]
    right_values = [right.value, right.value / 100] if right.percent and not given.percent else [right.value]
    if given.repeated != right.repeated:
        return "wrong", "one of them lists something more than once"
    if any(same(r, g) for r in right_values for g in given_values):
        return "correct", "math-verify finds them equal"
    return "wrong", "math-verify finds them different"


def same(gold: Any, answer: Any) -> bool:
    """math-verify's verdict, with a second comparison where it depends on notation."""
    return _verify(gold, answer) or _same_inequality(gold, answer) or _same_complex(gold, answer)


def _verify(gold: Any, answer: Any) -> bool:
    from math_verify import grader
    from sympy import Float

    inexact = any(getattr(value, "has", lambda *_: False)(Float) for value in (gold, answer))
    settings = {
        "float_rounding": _decimals(gold),
        # 15 digits cannot tell sqrt(10^40 + 1) from 10^20; but floats have no more, and would differ in further digits.
        "numeric_precision": 15 if inexact else 50,
        # Without it, (0, 1) and 0 < x < 1 are equal in one order and different in the other.
        "allow_set_relation_comp": True,
        "timeout_seconds": None,
        "raise_on_error": True,
    }
    # math-verify turns any exception of a comparison into "different", also a MemoryError. Its modules look up the name
    # `Exception` when they catch, so replace it by one that does not include those errors.
    grader.Exception = _ordinary_exceptions()
    try:
        return bool(grader.verify(gold, answer, **settings))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # another one that our narrower `Exception` let through: let math-verify handle it as usual
        del grader.Exception
        return bool(grader.verify(gold, answer, **(settings | {"raise_on_error": False})))
    finally:
        grader.__dict__.pop("Exception", None)


def _ordinary_exceptions() -> tuple[type[BaseException], ...]:
    runtime = [kind for kind in RuntimeError.__subclasses__() if kind is not RecursionError]
    return (*(kind for kind in Exception.__subclasses__() if kind not in (MemoryError, RuntimeError)), *runtime)


def _decimals(gold: Any) -> int:
    """Decimals to which a decimal fraction must agree: six, and more for golds that six would round to zero."""
    from sympy import Number

    size = abs(float(gold)) if isinstance(gold, Number) and gold.is_finite else 1.0
    return 6 if size == 0.0 or size >= 1.0 else max(6, 3 - math.floor(math.log10(size)))


def _same_inequality(gold: Any, answer: Any) -> bool:
    """0 < x < 1 and 1 > x > 0: math-verify compares chains link by link."""
    from math_verify.grader import is_equation, is_relation, unwrap_fcs

    if not (is_relation(gold) and is_relation(answer)) or is_equation(gold) or is_equation(answer):
        return False
    if gold.free_symbols != answer.free_symbols or len(gold.free_symbols) != 1:
        return False
    try:
        return bool(unwrap_fcs(gold).as_set() == unwrap_fcs(answer).as_set())
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy cannot solve it
        return False


def _same_complex(gold: Any, answer: Any) -> bool:
    """(1+i)^2 and 2i: math-verify reads i as a variable; if that says "different", try the imaginary unit."""
    from sympy import Basic, I, MatrixBase

    def imaginary(value: Any) -> Any:
        if not isinstance(value, Basic | MatrixBase):
            return value
        return value.subs({symbol: I for symbol in value.free_symbols if str(symbol) == "i"})

    try:
        units = imaginary(gold), imaginary(answer)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # an order relation between complex numbers, for one
        return False
    return (units[0] != gold or units[1] != answer) and _verify(*units)


# ---- the process ------------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until the other end closes the pipe."""
    source, sink = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # a library's print must not end up among the messages
        os.dup2(nowhere, standard)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # inherited from the thread that started us
    for deadly in (signal.SIGPROF, signal.SIGXCPU, signal.SIGIO):
        signal.signal(deadly, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    hello = _receive(source)
    if hello is None:
        return
    sys.path.extend(entry for entry in hello["path"] if entry not in sys.path and Path(entry).is_absolute())
    try:
        _warm_up()
    except Exception as error:
        _send(sink, {"failed": f"{type(error).__name__}: {error}"})
        return
    _limit(resource.RLIMIT_AS, hello["memory"])
    _limit(resource.RLIMIT_CORE, 0)
    _send(sink, {"ready": True})

    while (request := _receive(source)) is not None:
        _arm(source, request["timeout"])
        exhausted, status = None, "timeout"
        try:
            status, detail = judge(request["answer"], request["gold"])
        except MemoryError:
            exhausted, detail = "memory", f"out of memory: the check needs more than {hello['memory'] >> 20} MiB"
        except RecursionError:
            exhausted, detail = "stack", "out of stack: the expression is nested too deeply"
        _disarm(source)
        _send(sink, {"id": request["id"], "status": status, "detail": detail, "exhausted": exhausted})


def _warm_up() -> None:
    """Import everything and check one pair, so that the first request is as fast as the others."""
    import logging

    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)  # allow long integers; the time limit covers them
    judge(r"\frac{x}{2}+(0)", r"0.5x")


def _arm(source: int, timeout: float) -> None:
    """Let the kernel end this process when its CPU time is used up or its parent is gone, even inside C code."""
    signal.setitimer(signal.ITIMER_PROF, timeout)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + timeout) + 1)  # in case the timer is lost
    # The parent writes nothing during a check, so the only event on this pipe is its end: SIGIO, which terminates.
    fcntl.fcntl(source, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(source, fcntl.F_SETFL, fcntl.fcntl(source, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(source, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):  # the parent ended before the line above
        os._exit(0)


def _disarm(source: int) -> None:
    fcntl.fcntl(source, fcntl.F_SETFL, fcntl.fcntl(source, fcntl.F_GETFL) & ~os.O_ASYNC)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(which: int, soft: int) -> None:
    _, hard = resource.getrlimit(which)
    with contextlib.suppress(ValueError, OSError):  # a stricter limit is in force already
        resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _receive(source: int) -> Any:
    size = _read_exactly(source, 4)
    body = None if size is None else _read_exactly(source, struct.unpack(">I", size)[0])
    return None if body is None else json.loads(body)


def _read_exactly(source: int, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = os.read(source, min(count, 1 << 16))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(sink: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = struct.pack(">I", len(body)) + body
    while data:
        data = data[os.write(sink, data) :]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        serve()

r"""Takes the last \boxed{} of TEXT outside of thinking blocks and compares it with GOLD by math-verify, as evaluations do.
Prints the status (correct, wrong, unparsed or timeout), the answer that was found and the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from iwopd.errors import UserError

HELP = "is the boxed answer of a completion equal to a gold answer?"
EPILOG = (
    "Exit code 0 if correct, 1 if not. Examples: iwopd check-math 'So it is \\boxed{\\frac12}.' 0.5; "
    "iwopd check-math @completion.txt '(0,1)'; after `--` an argument may begin with a minus: "
    "iwopd check-math '\\boxed{-0.5}' -- '-\\frac12'."
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="the completion; - reads it from standard input, @FILE from a file")
    parser.add_argument("gold", metavar="GOLD", help="the right answer: bare LaTeX, no box, no dollars")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="CPU time for the comparison (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.eval.math import TIMEOUT_SECONDS, check_math

    timeout = TIMEOUT_SECONDS if options.timeout is None else options.timeout
    if not 0.0 < timeout < float("inf"):
        raise UserError(f"--timeout must be a positive number of seconds, got {timeout}")
    outcome = check_math(_text(options.text), options.gold, timeout=timeout)
    if options.json:
        print(json.dumps({"status": outcome.status, "answer": outcome.answer, "detail": outcome.detail}))
    else:
        answer = "(none)" if outcome.answer is None else _printable(outcome.answer)
        print(f"status  {outcome.status}\nanswer  {answer}\nreason  {outcome.detail}")
    return 0 if outcome.status == "correct" else 1


def _text(argument: str) -> str:
    if argument == "-":
        return sys.stdin.buffer.read().decode(errors="surrogateescape")
    if argument.startswith("@"):
        try:
            return Path(argument[1:]).read_bytes().decode(errors="surrogateescape")
        except OSError as error:
            raise UserError(f"cannot read {argument[1:]!r}: {error.strerror or error}") from None
    return argument


def _printable(answer: str) -> str:
    """Control characters and what the terminal cannot show as escapes, so that an answer cannot move the cursor."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in answer)
    return shown.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(sys.stdout.encoding or "ascii")

"""Run a Python program nobody trusts on tests, in a sandbox, and say whether it is right. Exit code 0 when it passes, 1 when
it does not, 2 when it could not be checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from iwopd.errors import UserError

HELP = "run a program on tests in the sandbox"
EPILOG = "example: iwopd check-code answer.py add tests.json     with tests.json: [[[1, 2], 3], [[0, 0], 0]]"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the program (- for standard input)")
    parser.add_argument("entry_point", nargs="?", help="the function to call")
    parser.add_argument("tests", nargs="?", help="JSON list of [[argument, ...], expected result]")
    parser.add_argument("--timeout", type=float, default=10.0, help="CPU seconds for all tests together (default: 10)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance for numbers (default: 1e-6 for floats)")
    parser.add_argument("--backend", choices=["bubblewrap", "landlock"], help="this sandbox (default: the best that works)")
    unsafe = "if no sandbox works, run the program without: it can then do whatever you can"
    parser.add_argument("--unsafe-no-sandbox", action="store_true", help=unsafe)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--self-test", action="store_true", help="try to break out of every sandbox, and say which ones hold")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    if options.self_test:
        return _self_test(options.json)
    if options.tests is None:
        raise UserError("check-code needs FILE, ENTRY_POINT and TESTS.json (or --self-test); see `iwopd check-code --help`")
    if not 0 <= options.atol < float("inf"):
        raise UserError(f"--atol must be a number, 0 or more, got {options.atol}")
    source, tests = _read("program", options.file), _tests(options.tests)
    from iwopd.eval.code import check_code

    named = {"timeout": options.timeout, "atol": options.atol, "unsafe": options.unsafe_no_sandbox, "backend": options.backend}
    try:
        outcome = check_code(source, options.entry_point, tests, **named)
    except ValueError as error:
        raise UserError(f"{options.tests}: {error}") from None
    if options.json:
        print(json.dumps(asdict(outcome)))
    else:
        print(f"{outcome.status}: {outcome.passed} of {outcome.total} tests, {outcome.seconds:.2f} s of CPU")
        if outcome.detail:
            print(outcome.detail)
    return 0 if outcome.status == "pass" else 1


def _self_test(as_json: bool) -> int:
    from iwopd.eval.sandbox import probe

    findings = probe.findings()
    used = next((name for name, problem in findings.items() if problem is None), None)
    if as_json:
        print(json.dumps({"used": used, "problems": findings}))
    else:
        for name, problem in findings.items():
            print(f"{name}: {problem or 'holds' + (', and is used' if name == used else '')}")
        if used is None:
            print("No sandbox works here: install bubblewrap, or use a Linux kernel from 5.13 on with Landlock.")
    return 0 if used else 1


def _read(what: str, name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the {what} {name}: {error}") from None


def _tests(path: str) -> list[Any]:
    text = _read("tests", path)
    try:
        tests = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(tests, list):
        raise UserError(f"{path}: expected a list of [[argument, ...], expected result], found a {type(tests).__name__}")
    return tests

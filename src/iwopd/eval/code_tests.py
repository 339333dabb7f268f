r"""Programs judged by tests that travel with a prompt, in the sandbox.

The tests stand in the prompt's field `tests`, or as JSON in its answer, in one of three forms:

    {"inputs": ["3\n1 2 3\n"], "outputs": ["6\n"]}                 a program: standard input and output (Eurus-RL-Code)
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}         a function: arguments and result
    ["assert add(1, 2) == 3"]                                      the same as assertions (MBPP)

Results are compared outside the sandbox, so that a program cannot vouch for itself: an assertion must be a call of one function
with plain data, compared with plain data by `==`. Anything else is refused when the prompts are read.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iwopd.eval.code import CodeOutcome, Judge, same
from iwopd.eval.fences import defines, extract_code
from iwopd.eval.sandbox import probe, wire
from iwopd.eval.sandbox.run import Program, run
from iwopd.eval.task import Verdict
from iwopd.types import Prompt

PROGRAM_SECONDS = 10.0
"""CPU time of a program for all its tests together; one that needs more is wrong."""
_SCRIPT = """\
import io, sys
_answer = compile({source!r}, "<answer>", "exec", dont_inherit=True)
def run_script(text):
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(out := io.BytesIO(), encoding="utf-8", write_through=True)
    try:
        exec(_answer, {{"__name__": "__main__", "exit": sys.exit, "quit": sys.exit}})
    except SystemExit:
        pass
    sys.stdout.flush()
    return out.getvalue().decode("utf-8", "replace").split()
"""
"""Words instead of the text: white space at the ends of lines is nobody's mistake."""


@dataclass(frozen=True)
class CodeTests:
    """Tests of one prompt."""

    entry_point: str | None
    """The function that is called; None: a script with standard input and output."""
    arguments: Sequence[Sequence[Any]]
    expected: Sequence[Any]

    def right(self, index: int, value: Any) -> bool:
        wanted = self.expected[index]
        if same(value, wanted):
            return True
        # Some sets wrap every result in a list.
        return self.entry_point is not None and isinstance(wanted, list) and len(wanted) == 1 and same(value, wanted[0])


def read_tests(prompt: Prompt) -> CodeTests:
    """The tests of a prompt; a ValueError says what is wrong with them."""
    found = prompt.metadata.get("tests")
    if found is None and prompt.answer is not None:
        try:
            found = json.loads(prompt.answer)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"its answer is not JSON ({error})") from None
    if found is None:
        raise ValueError("it has neither a field 'tests' nor an answer")
    if isinstance(found, str):
        found = [found]
    tests = _assertions(found) if isinstance(found, Sequence) else _pairs(found)
    if not tests.arguments:
        raise ValueError("it has no tests")
    try:
        wire.encode_plain([list(tests.arguments), list(tests.expected)])
    except wire.WireError as error:
        raise ValueError(f"its tests cannot be sent to a program: {error}") from None
    return tests


def check_tests(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """Right: the program in the answer passes all tests of its prompt. One that loops or crashes is wrong, not unjudged."""
    verdicts = []
    for prompt, text in zip(prompts, texts, strict=True):
        outcome = _check(read_tests(prompt), text)
        verdicts.append(Verdict(outcome.status, float(outcome.status == "pass"), None, outcome.detail))
    return verdicts


def _check(tests: CodeTests, text: str) -> CodeOutcome:
    if tests.entry_point is None:
        source, entry_point = _SCRIPT.format(source=extract_code(text)), "run_script"
    else:
        source, entry_point = _function(text, tests.entry_point), tests.entry_point
    judge, count = Judge(tests.right), len(tests.arguments)
    arguments = [wire.encode_plain(list(one)) for one in tests.arguments]
    job = Program(source, entry_point, arguments, [PROGRAM_SECONDS] * count, PROGRAM_SECONDS)
    return judge.outcome(run(job, probe.choose(), judge.receive), count)


def _function(text: str, name: str) -> str:
    """The program that defines the function, at the top or as a method of `Solution`, as answers to such problems do."""
    if defines(text, name):
        return extract_code(text, name)
    source = extract_code(text, "Solution")
    return f"{source}\n{name} = Solution().{name}\n" if "class Solution" in source else source


def _pairs(found: Any) -> CodeTests:
    if not isinstance(found, Mapping):
        raise ValueError(f"its tests are a {type(found).__name__}; they must be a list of assertions, or inputs and outputs")
    name, inputs, outputs = found.get("fn_name"), found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("its tests need two lists of one length, 'inputs' and 'outputs'")
    if name is None:
        return CodeTests(None, [[_text(one)] for one in inputs], [_text(one).split() for one in outputs])
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"'fn_name' must be the name of a function, got {name!r}")
    if wrong := next((one for one in inputs if not isinstance(one, list)), None):
        raise ValueError(f"with 'fn_name', every input is a list of arguments, not {wrong!r:.40}")
    return CodeTests(name, inputs, outputs)


def _text(given: Any) -> str:
    """A text, or its lines."""
    lines = given if isinstance(given, list) else [given]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(f"without 'fn_name', inputs and outputs are texts of standard input and output, not {given!r:.40}")
    return "\n".join(lines)


def _assertions(lines: Sequence[Any]) -> CodeTests:
    names, arguments, expected = set(), [], []
    for line in lines:
        name, given, wanted = _assertion(line)
        names.add(name)
        arguments.append(given)
        expected.append(wanted)
    if len(names) > 1:
        raise ValueError(f"its assertions call several functions: {', '.join(sorted(names))}")
    return CodeTests(names.pop() if names else "", arguments, expected)


def _assertion(line: Any) -> tuple[str, list[Any], Any]:
    try:
        match ast.parse(str(line).strip()).body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), given, []), [ast.Eq()], [wanted]))]:
                return name, [ast.literal_eval(one) for one in given], ast.literal_eval(wanted)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    raise ValueError(f"{str(line)!r:.80} is not of the form: assert name(plain data) == plain data")

"""Programs judged by tests that travel with their prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iwopd.eval.code_tests import check_tests, read_tests
from iwopd.types import Prompt


def code_prompt(tests: Any, *, in_answer: bool = True) -> Prompt:
    return Prompt("p", (3,), answer=json.dumps(tests)) if in_answer else Prompt("p", (3,), metadata={"tests": tests})


SUM = {"inputs": ["2\n1 2\n", "1\n5"], "outputs": ["3\n", "5"]}
LINES = {"inputs": [["2", "1 2"]], "outputs": [["3", "2"]]}
ADD = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]
CALLS = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], 4]}


@pytest.mark.parametrize(
    ("tests", "program", "status"),
    [
        (SUM, "n = int(input())\nprint(sum(map(int, input().split())), '')\nexit()", "pass"),
        (
            SUM,
            "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split()[1:])))\nassert __name__ == '__main__'",
            "pass",
        ),
        (LINES, "n = int(input())\nprint(sum(map(int, input().split())))\nprint(n)", "pass"),
        (SUM, "print(3)", "fail"),
        (SUM, "import os\nos._exit(0)", "error"),
        (SUM, "print(", "error"),
        (ADD, "def add(a, b): return a + b", "pass"),
        (ADD, "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()", "fail"),
        (ADD, "x = 1", "error"),
        (CALLS, "class Solution:\n    def add(self, a, b): return a + b", "pass"),
        (CALLS, "def add(a, b): return a * b", "fail"),
    ],
)
def test_programs_are_judged_by_the_prompts_tests(tests: Any, program: str, status: str) -> None:
    answer = f"First:\n```python\nprint('no')\n```\nThen:\n```python\n{program}\n```\n"
    for in_answer in (True, False):
        (found,) = check_tests([code_prompt(tests, in_answer=in_answer)], [answer])
        assert (found.status, found.score, found.judged) == (status, float(status == "pass"), True), found.detail


@pytest.mark.slow
def test_a_program_that_loops_is_wrong_and_not_unjudged() -> None:
    (found,) = check_tests([code_prompt(SUM)], ["```python\nwhile True: pass\n```"])
    assert (found.status, found.score, found.judged) == ("timeout", 0.0, True)


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (None, "its tests are a NoneType|neither a field"),
        ([], "no tests"),
        (3, "list of assertions, or inputs and outputs"),
        (["assert add(x) == 3"], "not of the form"),
        (["assert add(1) == 3 or True"], "not of the form"),
        (["import os"], "not of the form"),
        (["assert f(1) == 1", "assert g(1) == 1"], "several functions: f, g"),
        ({"inputs": ["1"], "outputs": []}, "two lists of one length"),
        ({"inputs": [1], "outputs": ["1"]}, "texts of standard input"),
        ({"fn_name": "f", "inputs": [1], "outputs": ["1"]}, "list of arguments"),
        ({"fn_name": "f g", "inputs": [[1]], "outputs": ["1"]}, "name of a function"),
    ],
)
def test_tests_that_cannot_be_run_are_refused(tests: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tests(code_prompt(tests))
    with pytest.raises(ValueError, match="not JSON"):
        read_tests(Prompt("p", (3,), answer="def"))

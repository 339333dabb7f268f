"""EvalPlus's data and verdicts, without running anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from iwopd.data.sources import SourceError
from iwopd.eval.code import close, is_floats, same
from iwopd.eval.evalplus import _Right
from iwopd.eval.evalplus_problems import CodeProblem, load_problems
from iwopd.eval.fences import extract_code
from iwopd.eval.sandbox import wire
from iwopd.eval.sandbox.run import Digest

ROW = {
    "task_id": "Mbpp/2",
    "prompt": '"""Shared elements."""\n',
    "entry_point": "similar_elements",
    "canonical_solution": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
    "base_input": [[[3, 4], [4, 5]]],
    "plus_input": {},
    "atol": 0,
}


def _file(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def _load_one(tmp_path: Path, **changes: Any) -> CodeProblem:
    return load_problems(_file(tmp_path, ROW | changes))[0]


def test_problems_are_loaded(tmp_path: Path) -> None:
    problem = _load_one(tmp_path)
    assert problem.dataset == "mbpp"
    assert problem.base_input == [[(3, 4), (4, 5)]]
    assert problem.plus_input == [], "an empty list was once written as an object"


@pytest.mark.parametrize(
    ("task", "given", "typed"),
    [
        (63, [[[1, 2], [3]]], [[(1, 2), (3,)]]),
        (75, [[[1, 2]], 3], [[(1, 2)], 3]),
        (106, [[1], [2]], [[1], (2,)]),
        (115, [[[1], [], [2, 2]]], [[{1}, {}, {2}]]),
        (124, ["0", "1j"], [0.0, 1j]),
        (252, ["(1+2j)"], [1 + 2j]),
        (259, [[[1, 2]], [[3, 4]]], [((1, 2),), ((3, 4),)]),
        (278, [[1, [2], 3]], [(1, (2,), 3)]),
        (307, [[1], 2, [3]], [(1,), 2, [3]]),
        (580, [[1, [2, [3]]]], [(1, (2, (3,)))]),
        (722, [{"a": [1, 2]}, 3, 4], [{"a": (1, 2)}, 3, 4]),
        (750, [[1], [2]], [[1], (2,)]),
        (999, [[1]], [[1]]),
    ],
)
def test_inputs_get_the_types_that_json_lost(tmp_path: Path, task: int, given: Any, typed: Any) -> None:
    found = _load_one(tmp_path, task_id=f"Mbpp/{task}", base_input=[given]).base_input[0]
    assert found == typed
    assert [type(item) for item in found] == [type(item) for item in typed]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", r"line 1 is not JSON"),
        ("[]", "expected an object, got list"),
        ({key: ROW[key] for key in ROW if key != "entry_point"}, "field 'entry_point' is missing"),
        (ROW | {"prompt": 3}, "field 'prompt' is a int"),
        (ROW | {"task_id": "Other/1"}, "'Other/1'"),
        (ROW | {"base_input": [3]}, "'base_input' must be a list of lists"),
        (ROW | {"base_input": []}, "'base_input' is empty"),
        (ROW | {"base_input": [[3]]}, "does not fit Mbpp/2"),
        ("", "holds no problems"),
    ],
)
def test_bad_files_are_named_with_line_and_field(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(SourceError, match=why):
        load_problems(_file(tmp_path, row))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no\.jsonl"):
        load_problems(tmp_path / "no.jsonl")


def test_the_line_of_a_bad_row_is_counted_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="line 3"):
        load_problems(_file(tmp_path, ROW, "", "oops"))


# --- equality

_EQUAL: list[tuple[Any, Any, float]] = [
    (1, 1, 0.0),
    (True, 1, 0.0),
    (2, 2.0, 0.0),
    (0.1 + 0.2, 0.3, 0.0),
    ([0.1 + 0.2], [0.3], 0.0),
    ((0.1 + 0.2, 1.0), (0.3, 1.0), 0.0),
    (1.00001, 1.0, 1e-4),
    ([[1.00001]], [[1.0]], 1e-4),
    ({"a": 1.0}, {"a": 1}, 0.0),
    (1e-7, 0.0, 0.0),
    (1e9 + 50.0, 1e9, 0.0),
]
_DIFFERENT: list[tuple[Any, Any, float]] = [
    ([1], (1,), 0.0),
    (1.001, 1.0, 0.0),
    (3, 3.0000001, 0.0),  # types must agree before a tolerance counts
    ([0.1 + 0.2, 1], [0.3, 1], 0.0),  # not all floats: exact
    ([[0.1 + 0.2]], [[0.3]], 0.0),  # nested: exact unless the problem names a tolerance
    ([1.0, 1.0], [1.0], 1e-4),
    ([[1.0]] * 3, [1.0] * 3, 1e-4),  # numpy would stretch one over the other
    (math.nan, math.nan, 0.0),
    ("1", 1, 1e-4),
    (None, 0.0, 0.0),
    ({"a": 0.1 + 0.2}, {"a": 0.3}, 1e-4),
    (10**400, 1.0, 0.0),
    ([10**400], [1.0], 0.0),
    (wire.Opaque("str"), "x", 0.0),
    (wire.Opaque("float"), 1.0, 0.0),
]


@pytest.mark.parametrize(("result", "expected", "atol"), _EQUAL)
def test_equal_enough(result: Any, expected: Any, atol: float) -> None:
    assert same(result, expected, atol)


@pytest.mark.parametrize(("result", "expected", "atol"), _DIFFERENT)
def test_not_equal(result: Any, expected: Any, atol: float) -> None:
    assert not same(result, expected, atol)


def test_words_are_not_made_into_arrays() -> None:
    words = ["x" * 3_000_000, *["y"] * 10_000]  # numpy would make each as wide as the first: 120 GB
    assert not close(words, [1.0] * 10_001, 1e-4)


def test_a_stretched_comparison_costs_nothing() -> None:
    side = 30_000  # numpy would make 900 million numbers of these
    assert not close([[float(x)] for x in range(side)], [float(x) for x in range(side)], 1e-4)


def test_floats() -> None:
    assert is_floats(1.0)
    assert is_floats([1.0, 2.0])
    assert not any(map(is_floats, ([], [1.0, 2], 1, "1.0", [[1.0]], {1.0}, True)))


def test_digests_stand_for_values() -> None:
    value = list(range(100))
    assert same(Digest(wire.digest(value)), value)
    assert same([float(x) for x in value], Digest(wire.digest(value)))
    assert not same(Digest(wire.digest(value)), value[1:])
    assert not same(Digest(b"x"), {1}), "what has no digest equals none"
    assert not same({1}, Digest(b"x"))


# --- oracles


def _right(name: str, task: str, arguments: list[Any], expected: Any, result: Any, atol: float = 0.0, **named: bool) -> bool:
    problem = CodeProblem(task, "", name, "", [arguments], [], atol)
    return _Right(problem, [arguments], [expected], named.get("as_published", False))(0, result)


@pytest.mark.parametrize(
    ("name", "arguments", "expected", "result", "right"),
    [
        ("similar_elements", [], (4, 5), [5, 4, 4], True),
        ("similar_elements", [], (4, 5), (4, 5, 6), False),
        ("similar_elements", [], (4, 5), (4,), False),
        ("similar_elements", [], (4, 5), None, False),
        ("similar_elements", [], (4, 5), [[4], 5], False),
        ("similar_elements", [], (), [], True),
        ("other_name", [], (4, 5), (5, 4), False),
        ("are_equivalent", [36, 57], True, "anything", True),
        ("sum_div", [8], 7, 0, True),
        ("sum_div", [8], 7, 6, False),
        ("surface_Area", [3, 4], 33, 35, True),
        ("surface_Area", [3, 4], 33, 34, False),
        ("surface_Area", [3, 4], 33, "x", False),
        ("digit_distance_nums", [1, 256], 7, 11, False),
        ("digit_distance_nums", [1, 256], 99, 12, True),
        ("check_str", ["a"], True, wire.Opaque("Match"), True),
        ("check_str", ["a"], True, True, True),
        ("check_str", ["a"], True, None, False),
        ("check_str", ["a"], False, None, True),
        ("check_str", ["a"], False, "no", False),
    ],
)
def test_mbpp_oracles(name: str, arguments: list[Any], expected: Any, result: Any, right: bool) -> None:
    assert _right(name, "Mbpp/1", arguments, expected, result) is right


@pytest.mark.parametrize(
    ("x", "right"), [(-0.5, True), (-0.50001, True), (0.5, False), ("x", False), (math.nan, False), (1e308, False)]
)
def test_any_zero_of_the_polynomial_will_do(x: Any, right: bool) -> None:
    assert _right("find_zero", "HumanEval/32", [[1, 2, 0, 0]], -123.0, x, 1e-4) is right
    assert not _right("find_zero", "HumanEval/32", [[1, 2, 0, 0]], -123.0, x, 1e-4, as_published=True)


def test_the_tolerance_stays_once_needed() -> None:
    """As in EvalPlus, where a float result makes the following tests tolerant too."""
    outputs: list[Any] = [[[1.0]], 2.0, [[1.0]]]
    right = _Right(CodeProblem("HumanEval/1", "", "f", "", [[]] * 3, [], 0.0), [[]] * 3, outputs, False)
    assert [right(0, [[1.0 + 1e-9]]), right(1, 2.0), right(2, [[1.0 + 1e-9]])] == [False, True, True]


# --- answers

_FENCED = """Text
```python
def f(x):
    return 1
```
no:
```py
import math
def f(x):
    return 2
```
```python
print(f(1))
```"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (_FENCED, "import math\ndef f(x):\n    return 2\n"),
        ("def f(x):\n    return 3\n", "def f(x):\n    return 3\n"),
        ("```\ndef f(x):\n    return 4\n```", "def f(x):\n    return 4\n"),
        ("```python\ndef f(x):\n    return 5\n", "def f(x):\n    return 5\n"),
        ("```bash\ndef f\n```\nno code", "```bash\ndef f\n```\nno code"),
        ("```python\nf = lambda x: 6\n```", "f = lambda x: 6\n"),
        ("```python\ndef other():\n    pass\n```", "```python\ndef other():\n    pass\n```"),
        ("", ""),
    ],
)
def test_the_program_is_found_in_the_answer(text: str, code: str) -> None:
    assert extract_code(text, "f") == code

"""Problems of HumanEval+ and MBPP+ as EvalPlus's files hold them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iwopd.data.sources import SourceError, records


@dataclass(frozen=True)
class CodeProblem:
    """One problem. Inputs are lists of positional arguments, of the types the function is meant for."""

    id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    base_input: list[Any]
    plus_input: list[Any]
    atol: float

    @property
    def dataset(self) -> str:
        """`humaneval` or `mbpp`."""
        return "mbpp" if self.id.startswith("Mbpp/") else "humaneval"

    @property
    def reference(self) -> str:
        """The canonical solution as a whole program."""
        return self.prompt + self.canonical_solution


def load_problems(path: str | os.PathLike[str]) -> list[CodeProblem]:
    """The problems of a file in EvalPlus's format (`HumanEvalPlus.jsonl`, its `-Mini`, `MbppPlus.jsonl`)."""
    problems = [_problem(row, where) for where, row in records(Path(path))]
    if not problems:
        raise SourceError(f"{path} holds no problems")
    return problems


def _problem(row: Mapping[str, Any], where: str) -> CodeProblem:
    for field, kinds in _FIELDS.items():
        if field not in row:
            raise SourceError(f"{where}: field {field!r} is missing")
        if not isinstance(row[field], kinds):
            raise SourceError(f"{where}: field {field!r} is a {type(row[field]).__name__}, which it cannot be")
    task = row["task_id"]
    if not re.fullmatch(r"(HumanEval|Mbpp)/\d+", task):
        raise SourceError(f"{where}: field 'task_id' is {task!r}, expected HumanEval/<number> or Mbpp/<number>")
    inputs = {}
    for field in ("base_input", "plus_input"):
        rows = row[field] or []  # an empty list was once written as {}
        if not isinstance(rows, list) or not all(isinstance(item, list) for item in rows):
            raise SourceError(f"{where}: field {field!r} must be a list of lists of arguments")
        try:
            inputs[field] = [_typed(task, item) for item in rows]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise SourceError(f"{where}: field {field!r} does not fit {task}: {error}") from None
    if not inputs["base_input"]:
        raise SourceError(f"{where}: field 'base_input' is empty")
    solution, atol = row["canonical_solution"], float(row["atol"])
    return CodeProblem(task, row["prompt"], row["entry_point"], solution, inputs["base_input"], inputs["plus_input"], atol)


_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("task_id", "prompt", "entry_point", "canonical_solution"), str),
    **dict.fromkeys(("base_input", "plus_input"), (list, dict)),
    "atol": (int, float),
}


# JSON has no tuples, sets and complex numbers; MBPP's functions want them


def _as_is(value: Any) -> Any:
    return value


def _list_of_tuples(value: Any) -> Any:
    return [tuple(item) for item in value]


def _all_tuples(value: Any) -> Any:
    return tuple(map(_all_tuples, value)) if isinstance(value, list) else value


def _sets(value: Any) -> Any:
    return [set(item) if isinstance(item, list) and item else {} for item in value]  # an empty one is a dict: so it was


# What each argument becomes; the last entry holds for all further arguments.
_SHAPES: list[tuple[tuple[Callable[[Any], Any], ...], str]] = [
    ((tuple,), "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809"),
    ((_list_of_tuples,), "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780"),
    ((_list_of_tuples, _as_is), "75 413 444 753"),
    ((_as_is, tuple), "106 750"),
    ((_sets,), "115"),
    ((float, complex), "124"),
    ((tuple, _as_is), "250 307 405 446 617 720 763 808"),
    ((lambda value: tuple(map(tuple, value)),), "259 401 445"),
    ((lambda value: tuple(tuple(item) if isinstance(item, list) else item for item in value),), "278"),
    ((lambda value: {key: tuple(item) for key, item in value.items()}, _as_is), "722"),
    ((complex,), "252"),
    ((_all_tuples,), "580 615 791"),
]
_SHAPE_OF = {f"Mbpp/{number}": shape for shape, numbers in _SHAPES for number in numbers.split()}


def _typed(task: str, arguments: list[Any]) -> list[Any]:
    shape = _SHAPE_OF.get(task)
    if shape is None:
        return arguments
    return [shape[min(place, len(shape) - 1)](value) for place, value in enumerate(arguments)]

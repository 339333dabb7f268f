"""Scores of one model on one task, as `evals.jsonl` and `eval.json` record them.

Everything in these files was written by someone else: each field is checked, and an error names the file, the field and what
it should be. The formats are in `docs/run-directory.md` and `docs/evaluation.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iwopd.errors import UserError
from iwopd.runs.logs import sound_record
from iwopd.types import EvalResult

EVAL_FORMAT = 1
LARGEST = 2**28
"""Bytes of an `eval.json` that are read at most: a wrong path must not fill the memory."""
REQUIRED: Any = object()
_KINDS = {str: "a string", int: "a whole number", dict: "an object", list: "a list"}


class ResultsError(UserError, ValueError):
    """Evaluation results that cannot be read or compared, and what to do."""


@dataclass(frozen=True, eq=False)
class TaskResults:
    """One model on one task."""

    result: EvalResult
    answers: tuple[tuple[str | None, ...], ...] | None = None
    """[N][K] canonical answers for majority voting (None: nothing could be read); None where the task has none."""


def read_task(name: Any, record: Mapping[str, Any], where: str, step: int | None = None) -> TaskResults:
    """Check `problem_ids`, `scores` and `answers` of a record; `where` begins every error."""
    if not isinstance(name, str):
        raise ResultsError(f"{where}: the field 'task' must be a string, got {short(name)}")
    ids = get_field(record, "problem_ids", list, where)
    if not ids or not all(isinstance(problem, str) for problem in ids):
        raise ResultsError(f"{where}: problem_ids must be a list of strings that is not empty")
    scores = get_field(record, "scores", list, where)
    width = len(scores[0]) if scores and isinstance(scores[0], list) else 0
    for row in scores:
        if not isinstance(row, list) or len(row) != width or not all(type(value) in (int, float) for value in row):
            raise ResultsError(f"{where}: scores must be {len(ids)} rows of equally many numbers (1 is right)")
    if len(scores) != len(ids) or width == 0:
        raise ResultsError(f"{where}: scores has {len(scores)} rows of {width} samples, problem_ids has {len(ids)} problems")
    answers = get_field(record, "answers", list, where, default=None)
    if answers is not None:
        good = len(answers) == len(ids) and all(isinstance(row, list) and len(row) == width for row in answers)
        if not good or not all(answer is None or isinstance(answer, str) for row in answers for answer in row):
            raise ResultsError(f"{where}: answers must be {len(ids)} rows of {width} strings or nulls, like scores")
    try:
        result = EvalResult(name, tuple(ids), torch.tensor(scores, dtype=torch.float64), step)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ResultsError(f"{where}: {error}") from None
    return TaskResults(result, None if answers is None else tuple(tuple(row) for row in answers))


def sound_evaluation(record: dict[str, Any]) -> bool:
    """Whether a record of `evals.jsonl` can be read as an evaluation."""
    try:
        read_task(record.get("task"), record, "")
    except ResultsError:
        return False
    return sound_record(record)


def read_eval(folder: Path) -> dict[str, Any]:
    """`eval.json` of an evaluation's folder."""
    file = folder / "eval.json"
    try:
        if file.stat().st_size > LARGEST:
            raise ResultsError(f"{file} has {file.stat().st_size:,} bytes; results have fewer than {LARGEST:,}")
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"{folder} is not an evaluation (it has no eval.json)") from None
    except OSError as error:
        raise ResultsError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{file} is damaged: {error}") from None
    if not isinstance(record, dict):
        raise ResultsError(f"{file} must be an object, got {short(record)}")
    if record.get("format") != EVAL_FORMAT:
        raise ResultsError(f"{file} has format {short(record.get('format'))}, this version of iwopd reads format {EVAL_FORMAT}")
    return record


def get_field(content: Mapping[str, Any], name: str, kind: type, where: str, default: Any = REQUIRED) -> Any:
    """A field of the given type; with `default=None` it may be missing."""
    value = content.get(name, default)
    if value is REQUIRED:
        raise ResultsError(f"{where}: the field {name!r} is missing")
    if value is None and default is None:
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ResultsError(f"{where}: {name} must be {_KINDS[kind]}, got {short(value)}")
    return value


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

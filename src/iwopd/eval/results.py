"""Read evaluation results back: of a training run (`evals.jsonl`) or of `iwopd eval` (`eval.json`).

Both come out as `ModelResults`, which is all that comparison and report know. Everything in these files was written by
someone else: each field is checked, and an error names the file, the field and the way out. The formats are in
`docs/run-directory.md` and `docs/evaluation.md`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from iwopd.errors import UserError
from iwopd.methods import METHODS, TITLES
from iwopd.types import EvalResult

RUN_FORMAT = 1
EVAL_FORMAT = 1
LARGEST = 2**28
"""Bytes of a results file that are read at most: a wrong path must not fill the memory."""


class ResultsError(UserError, ValueError):
    """Evaluation results that cannot be read or compared, with the way out."""


@dataclass(frozen=True, eq=False)
class TaskResults:
    """One model on one task, with what is needed beyond the scores."""

    result: EvalResult
    answers: tuple[tuple[str | None, ...], ...] | None = None
    """[N][K] canonical answers for majority voting (None: nothing could be read); None where the task has none."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """How many samples were correct, wrong, timed out, unparsed, ..."""
    aggregate: str = "mean@k"
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class ModelResults:
    """All tasks of one trained (or untrained) model."""

    path: Path
    kind: Literal["run", "eval"]
    method: str
    """Title of the method: `OPD`, `IW-OPD`; `Base` for step 0 of a run; the folder's name if nothing says better."""
    student: str | None
    seed: int | None
    """Training seed; None if it is not known."""
    step: int | None
    settings: Mapping[str, Any]
    """How it was evaluated: temperature, samples, ..."""
    recipe: Mapping[str, Any]
    """Dotted training settings of a run, without those that cannot change its result; empty for `iwopd eval`."""
    tasks: Mapping[str, TaskResults]


def load(path: Path, step: int | None = None) -> ModelResults:
    """Results of a directory of either kind. `step`: of a training run, default the last that was evaluated."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ResultsError(f"{path} {what}: give a run directory of `iwopd train` or the output directory of `iwopd eval`")
    if (path / "eval.json").exists():
        if step is not None:
            raise ResultsError(f"{path} is an evaluation of one model: a step can be chosen for training runs only")
        return _load_eval(path)
    if (path / "run.json").exists():
        return _load_run(path, step)
    raise ResultsError(f"{path} holds neither eval.json (of `iwopd eval`) nor run.json (of `iwopd train`)")


def evaluated_steps(path: Path) -> list[int]:
    """The steps of a training run that have evaluations."""
    return sorted({_get(record, "step", int, where) for where, record in _lines(path / "evals.jsonl")})


# --- `iwopd eval` ----------------------------------------------------------------------------------------------------


def _load_eval(path: Path) -> ModelResults:
    file = path / "eval.json"
    content = _object(_json(_read(file), str(file)), str(file))
    _check_format(content, EVAL_FORMAT, str(file))
    model = _get(content, "model", str, str(file))
    tasks = _get(content, "tasks", dict, str(file))
    if not tasks:
        raise ResultsError(f"{file}: tasks is empty; run `iwopd eval` again")
    return ModelResults(
        path=path,
        kind="eval",
        method=_get(content, "method", str, str(file), default=None) or path.absolute().name,
        student=_get(content, "student", str, str(file), default=None) or _hub_name(model),
        seed=_get(content, "train_seed", int, str(file), default=None),
        step=None,
        settings=_get(content, "settings", dict, str(file)),
        recipe={},
        tasks={
            name: _task(name, _object(task, f"{file}: tasks.{name}"), f"{file}: tasks.{name}") for name, task in tasks.items()
        },
    )


# --- `iwopd train` ---------------------------------------------------------------------------------------------------

UNRELATED = ("seed", "threads", "tracking", "checkpoint", "steps", "eval")
"""Settings in which seeds of one method may differ: they cannot change the method, or are compared by themselves."""
_SECTIONS = ("eval", "models", "method", "rollout")


def _load_run(path: Path, step: int | None) -> ModelResults:
    about = _object(_json(_read(path / "run.json"), str(path / "run.json")), str(path / "run.json"))
    _check_format(about, RUN_FORMAT, str(path / "run.json"))
    config = _config(path / "config.toml")
    records = list(_lines(path / "evals.jsonl"))
    steps = sorted({_get(record, "step", int, where) for where, record in records})
    if not steps:
        raise ResultsError(f"{path} has no evaluation yet (evals.jsonl is empty): set eval.prompts, or wait for the first one")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ResultsError(f"{path} was not evaluated at step {chosen}; steps with evaluations: {_some(steps)}")
    tasks = {}
    for where, record in records:
        if record["step"] == chosen:  # a later record of the same task replaces an earlier one, as after --resume
            name = _get(record, "task", str, where)
            tasks[name] = _task(name, record, where, chosen)
    parts = {name: _get(config, name, dict, str(path / "config.toml"), default=None) or {} for name in _SECTIONS}
    settings = {"samples": parts["eval"].get("samples"), "temperature": parts["eval"].get("temperature")}
    settings |= {"max_tokens": parts["rollout"].get("max_tokens"), "seed": config.get("seed")}
    return ModelResults(
        path=path,
        kind="run",
        method="Base" if chosen == 0 else method_title(parts["method"]),
        student=_student(parts["models"]),
        seed=_get(config, "seed", int, str(path / "config.toml"), default=None),
        step=chosen,
        settings={name: value for name, value in settings.items() if value is not None},
        recipe={name: value for name, value in _flatten(config) if name.split(".")[0] not in UNRELATED},
        tasks=tasks,
    )


def method_title(section: Mapping[str, Any]) -> str:
    """The paper's name of a `[method]` section; where it has none, the weight rule with its parameters."""
    advantage, weights = section.get("advantage", "opd"), section.get("weights", "uniform")
    params = section.get("params", {})
    for name, known in METHODS.items():
        same = (known.get("advantage", "opd"), known.get("weights", "uniform"), known.get("params", {}))
        if same == (advantage, weights, params) and (advantage == "opd" or section.get("scale", 1.25) == known.get("scale")):
            return TITLES[name]
    given = [f"{key}={value}" for key, value in params.items()] if isinstance(params, Mapping) else []
    scale = [f"scale={section.get('scale')}"] if advantage == "exopd" else []
    return " ".join(str(word) for word in (advantage, weights, *scale, *given))


def _student(models: Mapping[str, Any]) -> str | None:
    if models.get("student"):
        return str(models["student"]).rstrip("/").rpartition("/")[2] or None
    if models.get("world"):
        size, lineage = models.get("student_size"), models.get("lineage", 0)
        return f"{models['world']} world" + (f", {size}" if size else "") + (f", lineage {lineage}" if lineage else "")
    return None


# --- checked fields --------------------------------------------------------------------------------------------------


def _task(name: str, record: Mapping[str, Any], where: str, step: int | None = None) -> TaskResults:
    ids = _get(record, "problem_ids", list, where)
    if not ids or not all(isinstance(problem, str) for problem in ids):
        raise ResultsError(f"{where}: problem_ids must be a list of strings that is not empty")
    scores = _get(record, "scores", list, where)
    width = len(scores[0]) if scores and isinstance(scores[0], list) else 0
    for row in scores:
        if not isinstance(row, list) or len(row) != width or not all(_is_number(value) for value in row):
            raise ResultsError(f"{where}: scores must be {len(ids)} rows of equally many numbers (1 is right)")
    if len(scores) != len(ids) or width == 0:
        raise ResultsError(f"{where}: scores has {len(scores)} rows of {width} samples, problem_ids has {len(ids)} problems")
    answers = _get(record, "answers", list, where, default=None)
    if answers is not None:
        good = len(answers) == len(ids) and all(isinstance(row, list) and len(row) == width for row in answers)
        if not good or not all(answer is None or isinstance(answer, str) for row in answers for answer in row):
            raise ResultsError(f"{where}: answers must be {len(ids)} rows of {width} strings or nulls, like scores")
    outcomes = _get(record, "outcomes", dict, where, default=None) or {}
    seconds: Any = record.get("seconds")
    try:
        result = EvalResult(name, tuple(ids), torch.tensor(scores, dtype=torch.float64), step)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ResultsError(f"{where}: {error}") from None
    return TaskResults(
        result=result,
        answers=None if answers is None else tuple(tuple(row) for row in answers),
        outcomes={str(key): count for key, count in outcomes.items() if isinstance(count, int)},
        aggregate=_get(record, "aggregate", str, where, default=None) or "mean@k",
        seconds=float(seconds) if _is_number(seconds) else None,
    )


_REQUIRED: Any = object()


def _get(content: Mapping[str, Any], name: str, kind: type, where: str, default: Any = _REQUIRED) -> Any:
    value = content.get(name, default)
    if value is _REQUIRED:
        raise ResultsError(f"{where}: the field {name!r} is missing")
    if value is None and default is None:
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ResultsError(f"{where}: {name} must be {_KINDS[kind]}, got {_short(value)}")
    return value


_KINDS = {str: "a string", int: "a whole number", dict: "an object", list: "a list"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_format(content: Mapping[str, Any], known: int, where: str) -> None:
    if content.get("format") != known:
        raise ResultsError(f"{where} has format {_short(content.get('format'))}, this version of iwopd reads format {known}")


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST:
            raise ResultsError(f"{file} has {file.stat().st_size:,} bytes; results have fewer than {LARGEST:,}")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultsError(f"{file} is missing: is the directory complete?") from None
    except UnicodeDecodeError as error:
        raise ResultsError(f"{file} is damaged: {error}") from None
    except OSError as error:
        raise ResultsError(f"cannot read {file}: {error.strerror}") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ResultsError(f"{where} is damaged: {error}") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ResultsError(f"{where} must be an object, got {_short(value)}")
    return value


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object); a last line that a crash cut off is left out."""
    for number, line in enumerate(_read(file).split("\n")[:-1], 1):
        where = f"{file}, line {number}"
        yield where, _object(_json(line, where), where)


def _config(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise ResultsError(f"{file} is not TOML: {error}") from None


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _hub_name(model: str) -> str | None:
    """`Qwen/Qwen3-1.7B` names its model; a path to a checkpoint does not."""
    owner, _, name = model.rpartition("/")
    return name if name and not owner.strip(".").count("/") and not owner.startswith((".", "/")) else None


def _some(steps: list[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-5:]])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

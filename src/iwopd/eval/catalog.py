r"""The tasks that have a name, and how to write one's own.

A task of one's own is a TOML file, given where a name is expected (`--tasks my-task.toml`):

    name = "my-math"
    checker = "math"                     # math, exact, code, or a plug-in's (`eval/checkers.py`)
    file = "problems.jsonl"              # beside the TOML file; or hub = "org/name", hub_file = "test.parquet"
    problem = "question"                 # name of the field; answer and id likewise
    suffix = "\n\nAnswer in \\boxed{}."
    samples = 8

or a `TaskSpec` (or a function that returns one) that an entry point in the group `iwopd.tasks` names.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from iwopd.data.sources import Hub, Local, Release, Source
from iwopd.eval.checkers import CHECKERS, OwnProblems, find_checker
from iwopd.eval.problems import Opening, TaskError, TaskSpec, answered_problems
from iwopd.eval.task import Task
from iwopd.registry import Registry, suggestion

MATH_SUFFIX = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""The paper's."""


def _adopt(name: str, loaded: Any, where: str) -> TaskSpec:
    spec = loaded() if callable(loaded) else loaded
    if not isinstance(spec, TaskSpec):
        raise TypeError(f"gives a {type(spec).__name__}, not a TaskSpec")
    return spec


TASKS: Registry[TaskSpec] = Registry("task", "iwopd.tasks", _adopt)


def _math(name: str, source: Source, local_name: str, **more: Any) -> TaskSpec:
    return TaskSpec(name, "math", source, local_name, suffix=MATH_SUFFIX, samples=32, **more)


def _code(name: str, release: str, file: str, sha256: str) -> TaskSpec:
    source = Release(f"https://github.com/evalplus/{release}/{file}.gz", sha256)
    return TaskSpec(name, "code", source, file, temperature=0.0)


for _spec in (
    _math("aime24", Hub("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"), "aime24.jsonl"),
    _math("aime25", Hub("math-ai/aime25", "test.jsonl"), "aime25.jsonl"),
    _math("hmmt25", Hub("MathArena/hmmt_feb_2025", "data/train-00000-of-00001.parquet"), "hmmt25.jsonl", id="problem_idx"),
    _math("math500", Hub("HuggingFaceH4/MATH-500", "test.jsonl"), "math500.jsonl", id="unique_id"),
    _math(
        "gsm8k",
        Hub("openai/gsm8k", "main/test-00000-of-00001.parquet"),
        "gsm8k_test.jsonl",
        problem="question",
        answer_after="####",
    ),
    _code(
        "humaneval+",
        "humanevalplus_release/releases/download/v0.1.10",
        "HumanEvalPlus.jsonl",
        "42526ec0e7d5f3ee0b06d6ced98f8c8bae3d76519151bfb3d36f79010645bd7f",
    ),
    _code(
        "mbpp+",
        "mbppplus_release/releases/download/v0.2.0",
        "MbppPlus.jsonl",
        "b54e762755248ca411b523c917fa9f93c07b5ff2966bf60b3917b853926a3dad",
    ),
    TaskSpec("tiny", "tiny"),
    TaskSpec("tiny-drift", "tiny", world="drift"),
    TaskSpec("tiny-long", "tiny", world="long"),
):
    TASKS.add(_spec.name, _spec)


def find_task(name: str) -> TaskSpec:
    """The task of that name: built in, a TOML file, or a plug-in's."""
    if name.endswith(".toml"):
        return _from_toml(Path(name))
    try:
        return TASKS[name]
    except KeyError as error:
        raise TaskError(f"{error}, or the path of a TOML file") from None
    except (ImportError, TypeError) as error:
        raise TaskError(str(error)) from None


def load_task(spec: TaskSpec, tokenizer: Any, **options: Any) -> Task:
    """Read the problems and render them; `options` are those of `Opening`."""
    checker, opening = find_checker(spec.checker), Opening(tokenizer, **options)
    if isinstance(checker, OwnProblems):
        return checker.open(spec, opening)
    return Task(spec.name, answered_problems(spec, opening), checker, spec.samples, spec.temperature, spec.max_tokens)


def _from_toml(path: Path) -> TaskSpec:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"there is no task file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TaskError(f"cannot read the task file {path}: {error}") from None
    known = {field.name for field in fields(TaskSpec)} - {"source", "local_name", "world"}
    known |= {"file", "hub", "hub_file", "revision", "sha256"}
    if unknown := [name for name in values if name not in known]:
        raise TaskError(f"{path}: unknown key {unknown[0]!r}{suggestion(unknown[0], sorted(known))}")
    spec = TaskSpec(str(values.pop("name", path.stem)), "math", _toml_source(values, path))
    for name, value in values.items():
        wanted = type(getattr(spec, name))
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
            raise TaskError(f"{path}: {name} must be a {wanted.__name__}, got {value!r}")
    spec = replace(spec, **values)
    if spec.checker not in CHECKERS:
        raise TaskError(f"{path}: unknown checker {spec.checker!r}{suggestion(spec.checker, list(CHECKERS))}")
    return spec


def _toml_source(values: dict[str, Any], path: Path) -> Source | None:
    names = ("file", "hub", "hub_file", "revision", "sha256")
    file, repo, inside, revision, sha256 = (values.pop(name, None) for name in names)
    if sha256 is not None and (repo is None or not re.fullmatch(r"[0-9a-f]{64}", str(sha256))):
        raise TaskError(f"{path}: sha256 is that of the file on the hub: 64 digits, with hub and hub_file")
    if file is not None:
        return Local(path.parent / str(file))
    if repo is None:
        return None
    if inside is None:
        raise TaskError(f"{path}: with hub, hub_file must name the file in the repository")
    return Hub(str(repo), str(inside), str(revision or "main"), sha256)

r"""The tasks that have a name, and how to write one's own.

A task of one's own is a TOML file, given where a name is expected (`--tasks my-task.toml`):

    name = "my-math"
    checker = "math"                     # math, code or exact
    file = "problems.jsonl"              # beside the TOML file; or hub = "org/name", hub_file = "test.parquet"
    problem = "question"                 # name of the field; answer and id likewise
    suffix = "\n\nAnswer in \\boxed{}."
    samples = 8

or a `TaskSpec` (or a function that returns one) behind the entry point `iwopd.tasks`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from iwopd import tiny
from iwopd.data.chat import ChatError, encode, render
from iwopd.data.sources import Hub, Local, Release, Source, local_copy, records
from iwopd.errors import UserError
from iwopd.eval.checkers import code_checker, exact_checker, math_checker
from iwopd.eval.task import Checker, Task, one_by_one
from iwopd.types import Prompt

MATH_SUFFIX = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""The paper's."""
CODE_INSTRUCTION = "Complete the following Python function. Answer with the whole program in one Python code block.\n\n"
TINY_PROBLEMS = 1000


class TaskError(UserError, ValueError):
    """A task that does not exist or whose data does not fit, with the line and the field."""


@dataclass(frozen=True)
class TaskSpec:
    """How to make a task."""

    name: str
    checker: str
    """`math`, `code`, `exact`, or `tiny`."""
    source: Source | None = None
    local_name: str = ""
    """File of this name in the folder `IWOPD_DATA`, if there is one, comes before the source."""
    problem: str = "problem"
    answer: str = "answer"
    id: str = "id"
    """Names of the fields."""
    answer_after: str = ""
    """The answer is what stands behind this mark (GSM8K: `####`)."""
    suffix: str = ""
    """Follows every problem."""
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int = 16384
    world: str = tiny.DEFAULT_WORLD


def _math(name: str, source: Source, local_name: str, **more: Any) -> TaskSpec:
    return TaskSpec(name, "math", source, local_name, suffix=MATH_SUFFIX, samples=32, **more)


def _release(name: str, repo: str, version: str) -> Release:
    return Release(f"https://github.com/evalplus/{repo}/releases/download/{version}/{name}.jsonl.gz")


SPECS: Mapping[str, TaskSpec] = {
    spec.name: spec
    for spec in (
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
        TaskSpec(
            "humaneval+",
            "code",
            _release("HumanEvalPlus", "humanevalplus_release", "v0.1.10"),
            "HumanEvalPlus.jsonl",
            temperature=0.0,
        ),
        TaskSpec("mbpp+", "code", _release("MbppPlus", "mbppplus_release", "v0.2.0"), "MbppPlus.jsonl", temperature=0.0),
        TaskSpec("tiny", "tiny"),
        TaskSpec("tiny-drift", "tiny", world="drift"),
    )
}


def find_task(name: str) -> TaskSpec:
    """The task of that name: built in, a TOML file, or behind the entry point `iwopd.tasks`."""
    if name.endswith(".toml"):
        return _from_toml(Path(name))
    if name in SPECS:
        return SPECS[name]
    plugins = {entry.name: entry for entry in entry_points(group="iwopd.tasks")}
    if name in plugins:
        made = plugins[name].load()
        spec = made() if callable(made) else made
        if not isinstance(spec, TaskSpec):
            raise TaskError(f"the entry point {name!r} gives a {type(spec).__name__}, not a TaskSpec")
        return spec
    known = [*SPECS, *plugins]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}, or the path of a TOML file"
    raise TaskError(f"unknown task {name!r}; {hint}")


def load_task(
    spec: TaskSpec,
    tokenizer: Any,
    *,
    data: Path | None = None,
    limit: int | None = None,
    thinking: bool = False,
    chat: bool = True,
    unsafe: bool = False,
) -> Task:
    """Read the problems (from `data`, if given) and render them; `limit` keeps the first ones.

    Without `chat` the problem's text itself is the prompt: for base models that have no chat template.
    """
    if spec.checker == "tiny":
        return _tiny(spec, tokenizer, TINY_PROBLEMS if limit is None else limit)
    source = Local(data) if data is not None else local_copy(spec.local_name) or spec.source
    if source is None:
        raise TaskError(f"task {spec.name!r} names no source; give a file with --data {spec.name}=FILE")
    path = source.fetch()
    prompts: list[Prompt] = []
    check: Checker
    if spec.checker == "code":
        from iwopd.eval.evalplus import load_problems

        problems = {problem.id: problem for problem in load_problems(path)}
        for problem in list(problems.values())[:limit]:
            text = f"{CODE_INSTRUCTION}```python\n{problem.prompt.strip()}\n```"
            prompts.append(_prompt(problem.id, text, None, spec, tokenizer, thinking, chat))
        check = code_checker(problems, unsafe=unsafe)
    else:
        for id_, text, answer in _problems(path, spec, limit):
            prompts.append(_prompt(id_, text + spec.suffix, answer, spec, tokenizer, thinking, chat))
        check = {"math": math_checker, "exact": exact_checker}[spec.checker]
    if not prompts:
        raise TaskError(f"task {spec.name!r}: {path} has no problems")
    return Task(spec.name, prompts, check, spec.samples, spec.temperature, spec.max_tokens)


def _problems(path: Path, spec: TaskSpec, limit: int | None) -> list[tuple[str, str, str]]:
    """Id, problem and answer of every record; our own field names are understood beside those of the spec."""
    found: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    for where, item in records(path):
        if limit is not None and len(found) == limit:
            break
        text = _field(item, (spec.problem, "problem"), where)
        answer = _field(item, (spec.answer, "answer"), where)
        if spec.answer_after and spec.answer_after in answer:
            answer = answer.rpartition(spec.answer_after)[2]
        if not text.strip() or not answer.strip():
            raise TaskError(f"{where}: {'the problem' if not text.strip() else 'the answer'} is empty")
        id_ = str(item.get(spec.id, item.get("id", f"{spec.name}/{len(found)}")))
        if id_ in seen:
            raise TaskError(f"{where}: the id {id_!r} occurs twice")
        seen.add(id_)
        found.append((id_, text, answer.strip()))
    return found


def _field(item: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        value = item.get(name)
        if isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return str(value)
    wanted = " or ".join(repr(name) for name in dict.fromkeys(names))
    raise TaskError(f"{where}: needs a string {wanted}; it has the fields {', '.join(sorted(item))}")


def _prompt(id_: str, text: str, answer: str | None, spec: TaskSpec, tokenizer: Any, thinking: bool, chat: bool) -> Prompt:
    if not chat:
        return Prompt(id_, encode(tokenizer, text), text, answer)
    messages = [{"role": "user", "content": text}]
    try:
        rendered = render(tokenizer, messages, thinking=thinking)
    except ChatError as error:
        raise TaskError(f"task {spec.name!r}, problem {id_!r}: {error}; --no-chat gives a base model the bare text") from None
    return Prompt(id_, rendered.token_ids, rendered.text, answer, metadata={"messages": messages})


def _tiny(spec: TaskSpec, tokenizer: Any, count: int) -> Task:
    recipe = tiny.world_recipe(spec.world)
    prompts = tiny.eval_prompts(recipe.operands, count, tokenizer)
    check = one_by_one(lambda prompt, text: tiny.check(prompt.metadata["expression"], text))
    return Task(spec.name, prompts, check, 1, 1.0, tiny.max_response_tokens(recipe.operands))


def _from_toml(path: Path) -> TaskSpec:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"there is no task file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TaskError(f"cannot read the task file {path}: {error}") from None
    known = {field.name for field in fields(TaskSpec)} - {"source", "local_name", "world"} | {
        "file",
        "hub",
        "hub_file",
        "revision",
    }
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TaskError(f"{path}: unknown key {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"{sorted(known)}"))
    source = _toml_source(values, path)
    spec = TaskSpec(str(values.pop("name", path.stem)), "math", source)
    for name, value in values.items():
        wanted = type(getattr(spec, name))
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
            raise TaskError(f"{path}: {name} must be a {wanted.__name__}, got {value!r}")
    spec = replace(spec, **values)
    if spec.checker not in ("math", "code", "exact"):
        raise TaskError(f"{path}: checker must be math, code or exact, got {spec.checker!r}")
    return spec


def _toml_source(values: dict[str, Any], path: Path) -> Source | None:
    file, repo, inside = values.pop("file", None), values.pop("hub", None), values.pop("hub_file", None)
    revision = values.pop("revision", "main")
    if file is not None:
        return Local(path.parent / str(file))
    if repo is None:
        return None
    if inside is None:
        raise TaskError(f"{path}: with hub, hub_file must name the file in the repository")
    return Hub(str(repo), str(inside), str(revision))

"""What a probe works with: two models, prompts, a checker, and correct solutions where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iwopd import tiny
from iwopd.analysis.probe.result import ProbeError
from iwopd.data.chat import WITHOUT_THINKING, Rendering, encode
from iwopd.data.prompts import load_prompts
from iwopd.data.sources import records
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.checkers import OwnProblems, find_checker, math_checker
from iwopd.eval.problems import TaskSpec, problem_file, problem_id
from iwopd.eval.task import Checker, one_by_one
from iwopd.models import load_model, load_tokenizer
from iwopd.tiny.task import right_solution
from iwopd.types import Prompt
from iwopd.vocabulary import check_same_tokenizer, check_vocabulary

MAX_PROMPT_TOKENS = 2048


@dataclass
class Pair:
    """Student and teacher, loaded, with the vocabulary that they share."""

    tokenizer: Any
    student: Any
    teacher: Any
    """None once it has done its part: a large teacher would be in the way of the gradients."""
    student_name: str
    teacher_name: str

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)


@dataclass(frozen=True)
class Material:
    """Prompts and what is known about them."""

    prompts: list[Prompt]
    check: Checker | None = None
    checkable: frozenset[str] = frozenset()
    """Ids of the prompts that the checker can judge."""
    solutions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By prompt id: ids of a correct solution, end-of-sequence included."""
    task: str | None = None
    notes: tuple[str, ...] = ()
    max_tokens: int | None = None
    """How long answers are, where the task knows."""


def open_pair(
    student: str,
    teacher: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    names: tuple[str, str] | None = None,
) -> Pair:
    """Load both models and refuse a pair that does not share a vocabulary."""
    tokenizer = load_tokenizer(student, trust_remote_code=trust_remote_code)
    check_same_tokenizer(tokenizer, teacher, trust_remote_code=trust_remote_code)
    models = []
    for name, source in (("student", student), ("teacher", teacher)):
        model = load_model(source, dtype=dtype, device=device, trust_remote_code=trust_remote_code).eval()
        check_vocabulary(name, model, tokenizer)
        models.append(model)
    models[1].requires_grad_(False)
    return Pair(tokenizer, models[0], models[1], *(names or (student, teacher)))


def world_material(world: tiny.World, count: int) -> Material:
    """Evaluation prompts of an embedded world; every one has a solution."""
    prompts = world.eval_prompts(count)
    solutions, task = _tiny_solutions(prompts, world.tokenizer), f"world {world.recipe.name}"
    limit = world.max_response_tokens
    return Material(prompts, one_by_one(world.check), _all_ids(prompts), solutions, task, max_tokens=limit)


def task_material(
    name: str, tokenizer: Any, *, data: Path | None, limit: int, chat: bool = True, rendering: Rendering = WITHOUT_THINKING
) -> Material:
    """Prompts and checker of a named task; solutions from the field `solution` of its data, if it has one."""
    spec = find_task(name)
    task = load_task(spec, tokenizer, data=data, limit=limit, chat=chat, rendering=rendering)
    prompts = list(task.prompts)
    if spec.checker == "tiny":
        solutions = _tiny_solutions(prompts, tokenizer)
    else:
        with_answers = not isinstance(find_checker(spec.checker), OwnProblems)
        solutions = _encoded(_task_solutions(spec, data), prompts, tokenizer) if with_answers else {}
    return Material(prompts, task.check, _all_ids(prompts), solutions, task.name, max_tokens=task.max_tokens)


def file_material(
    path: Path, tokenizer: Any, *, limit: int, task: str | None = None, rendering: Rendering = WITHOUT_THINKING
) -> Material:
    """Prompts of a JSONL file (`data/prompts.py`), with `answer` and `solution` where it has them.

    Answers are checked as the task does, or without one as math: last box, up to symbolic equivalence.
    """
    spec = None if task is None else find_task(task)
    is_tiny = spec is not None and spec.checker == "tiny"
    loaded = load_prompts(path, rendering.of(tokenizer), MAX_PROMPT_TOKENS)
    notes = []
    if loaded.too_long:
        notes.append(f"{loaded.too_long} prompts have more than {MAX_PROMPT_TOKENS} tokens and were left out")
    prompts = loaded.prompts[:limit]
    checkable = _all_ids(prompts) if is_tiny else frozenset(prompt.id for prompt in prompts if prompt.answer is not None)
    if 0 < len(checkable) < len(prompts):
        silent = len(prompts) - len(checkable)
        notes.append(f"{silent} of {len(prompts)} prompts have no answer: the hand-off curve is without them")
    check = _file_checker(spec, prompts) if checkable else None
    solutions = _encoded(_file_solutions(path), prompts, tokenizer)
    longest = tiny.max_response_tokens(tiny.world_recipe(spec.world).operands) if spec is not None and is_tiny else None
    return Material(prompts, check, checkable, solutions, None if spec is None else spec.name, tuple(notes), longest)


def _file_checker(spec: TaskSpec | None, prompts: list[Prompt]) -> Checker:
    if spec is not None and spec.checker == "tiny":
        for prompt in prompts:
            try:
                tiny.check(prompt.text, "")
            except ValueError as error:
                raise ProbeError(f"prompt {prompt.id!r} is no problem of the embedded world: {error}") from None
        return one_by_one(lambda prompt, text: tiny.check(prompt.text, text))
    checker = math_checker if spec is None else find_checker(spec.checker)
    if isinstance(checker, OwnProblems):
        raise ProbeError(f"the task {spec.name if spec else ''!r} checks its own problems only: leave --prompts out")
    return checker


def _all_ids(prompts: list[Prompt]) -> frozenset[str]:
    return frozenset(prompt.id for prompt in prompts)


def _tiny_solutions(prompts: list[Prompt], tokenizer: Any) -> dict[str, tuple[int, ...]]:
    return {p.id: _ids(right_solution(p.metadata["expression"]), tokenizer) for p in prompts}


def _task_solutions(spec: TaskSpec, data: Path | None) -> dict[str, str]:
    items = enumerate(item for _, item in records(problem_file(spec, data)))
    return {problem_id(spec, item, number): item["solution"] for number, item in items if isinstance(item.get("solution"), str)}


def _file_solutions(path: Path) -> dict[str, str]:
    """`solution` of every record that has one, by the ids that `load_prompts` gives."""
    found = {}
    for number, (where, item) in enumerate(records(path), start=1):
        solution = item.get("solution")
        if solution is not None and not isinstance(solution, str):
            raise ProbeError(f"{where}: 'solution' must be a text, got {type(solution).__name__}")
        if solution:
            id_ = item.get("id")
            found[str(number if id_ is None else id_)] = solution
    return found


def _encoded(solutions: Mapping[str, str], prompts: list[Prompt], tokenizer: Any) -> dict[str, tuple[int, ...]]:
    return {prompt.id: _ids(solutions[prompt.id], tokenizer) for prompt in prompts if prompt.id in solutions}


def _ids(solution: str, tokenizer: Any) -> tuple[int, ...]:
    """A solution as the student should have written it: its end belongs to it."""
    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return (*encode(tokenizer, solution), *end)

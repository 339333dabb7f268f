"""The checkers of tasks by name: math by symbolic equivalence, text by equality, code in the sandbox, the embedded world.

Another package adds one with an entry point in the group `iwopd.checkers`: a function `(prompts, texts) -> verdicts` that
judges answers by the prompts' field `answer` (`eval.task.one_by_one` makes one of a plain comparison), or `OwnProblems`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from iwopd import tiny
from iwopd.data.thinking import strip_thinking
from iwopd.eval.math import check_math_many
from iwopd.eval.problems import Opening, TaskError, TaskSpec, problem_file
from iwopd.eval.task import Checker, Task, Verdict, one_by_one
from iwopd.registry import Registry
from iwopd.types import Prompt

CODE_INSTRUCTION = "Complete the following Python function. Answer with the whole program in one Python code block.\n\n"
TINY_PROBLEMS = 1000


def _no_answer(prompt: Prompt) -> str | None:
    return None if prompt.answer and prompt.answer.strip() else "it has no answer to compare with"


@dataclass(frozen=True)
class PromptChecker:
    """Judges answers to training prompts: the reward's checker."""

    check: Checker
    lacks: Callable[[Prompt], str | None] = _no_answer
    """What keeps a prompt from being judged; None: nothing."""
    ready: Callable[[], object] = lambda: None
    """Raises a `UserError` if it cannot work on this machine."""
    least_timeout: float = 0.0
    """Seconds that it may need for one answer without being at fault."""


@dataclass(frozen=True)
class OwnProblems:
    """A checker with problems of a kind of its own, which have more than a text and an answer."""

    open: Callable[[TaskSpec, Opening], Task]
    prompts: PromptChecker | None = None
    """How it judges training prompts; None: it cannot."""


def _adopt(name: str, loaded: Any, where: str) -> Checker | OwnProblems:
    if not (isinstance(loaded, OwnProblems) or callable(loaded)):
        raise TypeError(f"must be a function (prompts, texts) -> verdicts, or OwnProblems; got {loaded!r}")
    return cast(Checker | OwnProblems, loaded)


CHECKERS: Registry[Checker | OwnProblems] = Registry("checker", "iwopd.checkers", _adopt)


def find_checker(name: str) -> Checker | OwnProblems:
    try:
        return CHECKERS[name]
    except (KeyError, ImportError, TypeError) as error:
        raise TaskError(str(error)) from None


def prompt_checker(name: str) -> PromptChecker:
    """The checker of that name as it judges training prompts."""
    found = find_checker(name)
    if not isinstance(found, OwnProblems):
        return PromptChecker(found)
    if found.prompts is None:
        raise TaskError(f"checker {name!r} judges the problems of its own tasks only, not training prompts")
    return found.prompts


def math_checker(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """Last box against the prompt's answer, up to symbolic equivalence."""
    pairs = [(text, prompt.answer or "") for prompt, text in zip(prompts, texts, strict=True)]
    verdicts = []
    for (_, gold), outcome in zip(pairs, check_math_many(pairs), strict=True):
        right = outcome.status == "correct"
        # In a majority vote all right answers are one class; wrong ones are equal if their texts are.
        vote = gold if right else None if outcome.answer is None else _squeeze(outcome.answer)
        judged = outcome.status != "timeout" and not outcome.detail.startswith("the GOLD")
        verdicts.append(Verdict(outcome.status, float(right), vote, outcome.detail, judged))
    return verdicts


def exact_checker(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """The whole answer outside thinking blocks against the prompt's, apart from white space."""
    verdicts = []
    for prompt, text in zip(prompts, texts, strict=True):
        given = _squeeze(strip_thinking(text))
        right = given == _squeeze(prompt.answer or "")
        verdicts.append(Verdict("correct" if right else "wrong", float(right), given))
    return verdicts


def code_task(spec: TaskSpec, opening: Opening) -> Task:
    """Problems of EvalPlus, with base and plus tests in the sandbox; right means that both pass."""
    from iwopd.eval.evalplus import check_solutions
    from iwopd.eval.evalplus_problems import load_problems
    from iwopd.eval.fences import extract_code
    from iwopd.eval.sandbox import probe

    sandbox = probe.description(unsafe=opening.unsafe)  # refuses here, before a model is loaded
    problems = {problem.id: problem for problem in load_problems(problem_file(spec, opening.data))}

    def judge(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        asked = [problems[prompt.id] for prompt in prompts]
        jobs = [(problem, extract_code(text, problem.entry_point)) for problem, text in zip(asked, texts, strict=True)]
        verdicts = []
        for outcome in check_solutions(jobs, unsafe=opening.unsafe):
            both = outcome.base if outcome.base.status != "pass" else outcome.plus
            detail = f"base {outcome.base.status}, plus {outcome.plus.status}. {both.detail}".strip()
            verdicts.append(Verdict(both.status, float(both.status == "pass"), None, detail))
        return verdicts

    prompts = [
        opening.prompt(spec, problem.id, f"{CODE_INSTRUCTION}```python\n{problem.prompt.strip()}\n```")
        for problem in list(problems.values())[: opening.limit]
    ]
    return Task(spec.name, prompts, judge, spec.samples, spec.temperature, spec.max_tokens, sandbox)


def tiny_task(spec: TaskSpec, opening: Opening) -> Task:
    """Problems of an embedded world, made on the spot."""
    if opening.data is not None:
        raise TaskError(f"task {spec.name!r} makes its own problems: leave its data file {opening.data} out")
    recipe = tiny.world_recipe(spec.world)
    count = TINY_PROBLEMS if opening.limit is None else opening.limit
    prompts = tiny.eval_prompts(recipe.operands, count, opening.tokenizer)
    return Task(spec.name, prompts, tiny_checker, 1, 1.0, tiny.max_response_tokens(recipe.operands))


tiny_checker = one_by_one(lambda prompt, text: tiny.check(prompt.metadata["expression"], text))


def _no_expression(prompt: Prompt) -> str | None:
    return None if "expression" in prompt.metadata else "it is not a problem of an embedded world (models.world)"


def _no_tests(prompt: Prompt) -> str | None:
    from iwopd.eval.code_tests import read_tests

    try:
        read_tests(prompt)
    except ValueError as error:
        return str(error)
    return None


def _run_tests(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    from iwopd.eval.code_tests import check_tests

    return check_tests(prompts, texts)


def _find_sandbox() -> None:
    from iwopd.eval.sandbox import probe

    probe.choose()


CODE_TIMEOUT = 30.0
"""A program of the student may take 10 s of CPU time; on a busy machine that is more of the clock's."""
CHECKERS.add("math", math_checker)
CHECKERS.add("exact", exact_checker)
CHECKERS.add("code", OwnProblems(code_task, PromptChecker(_run_tests, _no_tests, _find_sandbox, CODE_TIMEOUT)))
CHECKERS.add("tiny", OwnProblems(tiny_task, PromptChecker(tiny_checker, _no_expression)))


def _squeeze(text: str) -> str:
    return " ".join(text.split())

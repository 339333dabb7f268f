"""The checkers of tasks: math by symbolic equivalence, code in the sandbox, text by equality."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from iwopd.eval.math import check_math_many
from iwopd.eval.task import Checker, Verdict
from iwopd.types import Prompt

if TYPE_CHECKING:
    from iwopd.eval.evalplus import CodeProblem


def math_checker(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """Last box against the prompt's answer, up to symbolic equivalence."""
    pairs = [(text, prompt.answer or "") for prompt, text in zip(prompts, texts, strict=True)]
    verdicts = []
    for (_, gold), outcome in zip(pairs, check_math_many(pairs), strict=True):
        right = outcome.status == "correct"
        # In a majority vote all right answers are one class; wrong ones are equal if their texts are.
        vote = gold if right else None if outcome.answer is None else _squeeze(outcome.answer)
        verdicts.append(Verdict(outcome.status, float(right), vote, outcome.detail))
    return verdicts


def exact_checker(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """The whole answer against the prompt's, apart from white space."""
    verdicts = []
    for prompt, text in zip(prompts, texts, strict=True):
        right = _squeeze(text) == _squeeze(prompt.answer or "")
        verdicts.append(Verdict("correct" if right else "wrong", float(right), _squeeze(text)))
    return verdicts


def code_checker(problems: Mapping[str, CodeProblem], *, unsafe: bool = False) -> Checker:
    """Base and plus tests of EvalPlus, in the sandbox; right means that both pass."""
    from iwopd.eval.evalplus import check_solutions, extract_code

    def judge(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        jobs = []
        for prompt, text in zip(prompts, texts, strict=True):
            problem = problems[prompt.id]
            jobs.append((problem, extract_code(text, problem.entry_point)))
        verdicts = []
        for outcome in check_solutions(jobs, unsafe=unsafe):
            both = outcome.base if outcome.base.status != "pass" else outcome.plus
            detail = f"base {outcome.base.status}, plus {outcome.plus.status}. {both.detail}".strip()
            verdicts.append(Verdict(both.status, float(both.status == "pass"), None, detail))
        return verdicts

    return judge


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()

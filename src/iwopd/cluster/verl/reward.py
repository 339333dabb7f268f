"""The task reward inside verl: its reward workers call `judge` for every answer while others are still being written.

verl itself demands a reward and gets 0: its own advantages stay 0, and the hook adds ours (`hook.py`). The verdict travels
beside it, as NaN where there is none: no verdict is not a wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from iwopd.background import in_background
from iwopd.data.fields import DataError
from iwopd.eval.checkers import PromptChecker, prompt_checker
from iwopd.eval.workers import usable_cores
from iwopd.train.checking import Judged
from iwopd.train.reward import verdict
from iwopd.types import Prompt

TRAINING = "iwopd"
"""The rows' `data_source` of training prompts; that of an evaluation's problems is its task."""
REWARD, FAILURE = "iwopd_reward", "iwopd_failure"


def no_reward(**given: Any) -> float:
    """0 for every answer: without a checker, and for evaluations, which the launcher judges."""
    return 0.0


async def judge(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    *,
    checker: str,
    timeout: float,
    workers: int | None = None,
    **_: Any,
) -> float | dict[str, Any]:
    """The reward function that verl calls: 0, and beside it what the checker says of the answer."""
    if data_source != TRAINING:
        return no_reward()
    async with _places(workers):
        found = await asyncio.to_thread(_in_time, lambda: _verdict(checker, ground_truth, solution_str), timeout)
    return {"score": no_reward(), REWARD: found.reward, FAILURE: found.failure}


def read_verdict(extra_fields: Mapping[str, Any]) -> Judged:
    """What `judge` said, from verl's column `extra_fields` of one rollout."""
    told = extra_fields.get("reward_extra_info", {}) if isinstance(extra_fields, Mapping) else {}
    if REWARD not in told:
        return Judged(math.nan, "verl's reward worker gave no answer")
    return Judged(float(told[REWARD]), str(told[FAILURE]))


def written_prompt(prompt: Prompt) -> str:
    """What a checker must know of a prompt, as text: verl's `ground_truth`."""
    try:
        return json.dumps([prompt.id, prompt.answer, prompt.begun, dict(prompt.metadata)])
    except TypeError as error:
        raise DataError(f"prompt {prompt.id!r} has a field that a verl job cannot be given ({error}): leave it out") from None


def read_prompt(text: str) -> Prompt:
    number, answer, begun, metadata = json.loads(text)
    return Prompt(number, (0,), answer=answer, begun=begun, metadata=metadata)  # the ids are nothing to a checker


def _verdict(checker: str, prompt: str, answer: str) -> Judged:
    asked = read_prompt(prompt)
    if (why := _found(checker).lacks(asked)) is not None:
        return Judged(math.nan, why)
    return verdict(_found(checker), asked, answer)


@lru_cache
def _found(checker: str) -> PromptChecker:
    return prompt_checker(checker)


@lru_cache
def _places(workers: int | None) -> asyncio.Semaphore:
    """Answers that one reward worker judges at once."""
    return asyncio.Semaphore(workers or usable_cores())


def _in_time(check: Callable[[], Judged], timeout: float) -> Judged:
    """Whatever goes wrong costs one answer its reward and nothing else; a thread that hangs is left behind."""
    done = in_background(check)
    try:
        return done.result(timeout)
    except BaseException as error:  # of somebody else's code, or the clock's
        why = f"{type(error).__name__}: {error}" if done.done() else f"no verdict within {timeout:g} s (reward.timeout)"
        return Judged(math.nan, why)

"""Checks of the training prompts: empty, duplicate, too long, or with their answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from iwopd.data.chat import ChatError
from iwopd.eval.checkers import prompt_checker
from iwopd.train.authors import answers_refuse
from iwopd.train.chats import student_chat
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, listed, passed, warning
from iwopd.train.reward import Unjudged, reward_refuses
from iwopd.types import Prompt

LONG_ANSWER = 6
"""An answer of at least this many letters in its prompt is a leak; shorter ones (numbers) occur by chance."""
LEAK = re.compile(r"(?:answer|solution|result)(?: is|:|=)?\s*+[:=]?\s*+$|####\s*+$|\\boxed\{\s*+$", re.IGNORECASE)
"""The text before a short answer that is a leak."""


def check_data(case: Case) -> Iterator[Finding]:
    """Prompts exist, are not empty, duplicate or too long, and do not hold their answers."""
    left_out = [*_left_out(case)]
    if case.data_problem:
        yield from left_out
        yield failure("data", case.data_problem, _remedy(case))
        return
    if not case.prompts:
        if case.student.tokenizer is not None:
            yield failure("data", "there are no training prompts", "name some in [data]")
        return
    yield from left_out
    found = [*_empty(case), *_twice(case.prompts), *_leaks(case.prompts)]
    yield from found
    yield from _unjudgeable(case)
    yield from (failure("mix", *refused) for refused in answers_refuse(case.config, case.prompts))
    if not found:
        yield passed("data", f"{len(case.prompts):,} prompts checked, none empty, duplicate, or with its answer in it")


def check_contamination(prompts: Sequence[Prompt], tasks: dict[str, Sequence[Prompt]]) -> Iterator[Finding]:
    """No evaluation problem is a training prompt."""
    trained_on = {prompt.token_ids for prompt in prompts}
    for name, problems in tasks.items():
        shared = [prompt for prompt in problems if prompt.token_ids in trained_on]
        if shared:
            found = f"{len(shared):,} of {len(problems):,} problems of {name} are training prompts, such as {shared[0].id!r}"
            yield warning("evaluation", found, "take them out of the training data, or evaluate on another task")
        else:
            yield passed("evaluation", f"none of the {len(problems):,} problems of {name} is a training prompt")


def _remedy(case: Case) -> str:
    """What to do about data that cannot be used."""
    if case.sets:  # they were read: what is wrong is the settings of a step, and the words say which
        return ""
    lost = case.config.data.prompts is not None and not Path(case.config.data.prompts).exists()
    return "correct data.prompts" if lost else "correct the data, see docs/train-your-own.md"


def _left_out(case: Case) -> Iterator[Finding]:
    """What the user asked to leave out passes; what is too long may be a surprise."""
    for loaded in case.sets:
        words = loaded.summary(case.config.data.max_prompt_tokens)
        if loaded.too_long:
            yield warning("data", words, "raise data.max_prompt_tokens if the long ones matter")
        elif loaded.filtered or loaded.duplicates or len(case.sets) > 1:
            asked = {"filter": loaded.filtered, "unique = true": loaded.duplicates}
            reasons = listed(f"`{setting}`" for setting, count in asked.items() if count) if any(asked.values()) else ""
            yield passed("data", f"{words}, as {reasons} of the set asks" if reasons else words)


def _empty(case: Case) -> Iterator[Finding]:
    """An empty message is rendered to the template alone."""
    try:
        nothing = student_chat(case.config, case.student.tokenizer).text([{"role": "user", "content": ""}]).split()
    except ChatError:  # a template that refuses empty messages has done so at loading
        return
    empty = [prompt for prompt in case.prompts if prompt.text.split() == nothing]
    if empty:
        message = f"{len(empty):,} prompts are empty, such as {empty[0].id!r}"
        yield warning("data", message, "take them out: the answers would be noise")


def _unjudgeable(case: Case) -> Iterator[Finding]:
    """With a reward: prompts that its checker cannot judge answers to."""
    name = case.config.reward.checker
    if name is not None and not any(reward_refuses(case.config)):
        unjudged = Unjudged.find(prompt_checker(name), name, case.prompts)
        yield from (failure("reward", *refused) for refused in unjudged.refuse())
        yield from (warning("reward", *refused) for refused in unjudged.tolerate())


def _twice(prompts: Sequence[Prompt]) -> Iterator[Finding]:
    counts = Counter(prompt.token_ids for prompt in prompts)
    again = sum(count - 1 for count in counts.values())
    if again:
        first = next(prompt for prompt in prompts if counts[prompt.token_ids] > 1)
        message = f"{again:,} of {len(prompts):,} prompts occur more than once, such as {first.id!r}"
        yield warning("data", message, "remove the duplicates, unless they are meant to count more")


def _leaks(prompts: Sequence[Prompt]) -> Iterator[Finding]:
    leaking = [prompt for prompt in prompts if prompt.answer and _leaks_answer(prompt.text, prompt.answer.strip())]
    if leaking:
        message = f"{len(leaking):,} of {len(prompts):,} prompts hold their own answer, such as {leaking[0].id!r}"
        yield warning("data", message, "check whether the answer's field was rendered into the prompt")


def _leaks_answer(text: str, answer: str) -> bool:
    if not answer:
        return False
    places = re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text)
    if len(answer) >= LONG_ANSWER and not answer.isdigit():
        return next(places, None) is not None
    return any(LEAK.search(text[max(0, match.start() - 40) : match.start()]) for match in places)

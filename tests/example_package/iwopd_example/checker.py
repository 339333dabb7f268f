"""A checker of answers: right if the digits of the answer occur in this order."""

from __future__ import annotations

from iwopd.eval.task import one_by_one
from iwopd.types import Prompt


def _same(prompt: Prompt, text: str) -> bool:
    return [one for one in text if one.isdigit()] == [one for one in prompt.answer or "" if one.isdigit()]


same_digits = one_by_one(_same)

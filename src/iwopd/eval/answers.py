"""Answers as checkers read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from iwopd.data.thinking import TAG
from iwopd.eval.task import Checker, Verdict
from iwopd.types import Prompt


def answer_text(tokenizer: Any, ids: Tensor) -> str:
    """The text of a response without special tokens; tags of thinking blocks stay, special or not: checkers look for them."""
    tags = special_tags(tokenizer)
    if not tags:
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    parts = []
    for tag, group in groupby(ids.tolist(), tags.get):
        some = list(group)
        parts.append(tag * len(some) if tag else str(tokenizer.decode(some, skip_special_tokens=True)))
    return "".join(parts)


def special_tags(tokenizer: Any) -> dict[int, str]:
    """Tags of thinking blocks that are special tokens of this tokenizer, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(number): str(token) for number, token in added.items() if token.special and TAG.fullmatch(str(token))}


def check_answers(check: Checker, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """Verdicts on whole answers: with what the prompt holds of each already, a prefill or the opening of a thinking block."""
    return check(prompts, [prompt.begun + text for prompt, text in zip(prompts, texts, strict=True)])

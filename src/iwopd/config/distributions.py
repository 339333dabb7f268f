"""What kinds of teacher servers can say of tokens beside their log-probs, known before anything is loaded or asked.

The names are those of `algo.views.Wanted.names`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

DialectName = Literal["vllm", "sglang", "iwopd"]

WORDS = {
    "entropy": "entropies",
    "top-k": "likeliest ids (top-k)",
    "chosen": "log-probs of ids that the student chose",
    "states": "hidden states (whole distributions)",
}
"""All that a scorer can be asked for, in words."""

GIVES: dict[DialectName, frozenset[str]] = {
    "vllm": frozenset({"top-k"}),
    "sglang": frozenset({"top-k"}),
    "iwopd": frozenset(WORDS),
}


MOST_IDS = 2**10
"""Ids of one token that `iwopd serve-teacher` says something of, at most."""


def in_words(names: Set[str]) -> str:
    return ", ".join(WORDS[name] for name in WORDS if name in names)


def refusal(needed: Set[str], dialect: DialectName, section: str = "teacher") -> str | None:
    """Why servers of this dialect cannot give what is needed, and what would work; None if they can."""
    missing = needed - GIVES[dialect]
    if not missing:
        return None
    able = ", ".join(["log-probs of the written tokens", *filter(None, [in_words(GIVES[dialect])])])
    place = "models.teacher" if section == "teacher" else f"{section}.model"
    return (
        f"{section}.dialect is {dialect!r}: such servers give {able}, but not {in_words(missing)}. Serve the teacher with "
        f"`iwopd serve-teacher` and set {section}.dialect = 'iwopd', or load it here ({place} without {section}.urls)"
    )

"""Text that others wrote, made fit for pages and terminals."""

from __future__ import annotations

import re

SUBSCRIPTS = {"lp_T": "T", "lp₀": "0"}
"""Log-probs of teacher and student as our own words write them, and the letters that belong below the line."""


def printable(text: str) -> str:
    """Text without characters that steer a terminal, turn the writing direction or cannot be encoded."""
    return _UNPRINTABLE.sub(_visible, text)


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

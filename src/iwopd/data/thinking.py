"""Thinking blocks: what of an answer stands between `<think>` and `</think>`.

Rules, the same for evaluation and training:

- A block reaches from its opening tag to its closing one, the tags included. One that is never closed reaches to the end.
- A closing tag without an opening one ends a block that began before the text, so everything before it is thinking.
- An opening tag inside a block is part of it.
"""

from __future__ import annotations

import re

_TAG = r"<\s{0,2}(/?)\s{0,2}think(?:ing)?\s{0,2}>"
TAG = re.compile(_TAG, re.IGNORECASE)
_LAST_TAG = re.compile(_TAG + r"\Z", re.IGNORECASE)
_LONGEST_TAG = 20


def thinking_spans(text: str) -> list[tuple[int, int]]:
    """Where thinking blocks begin and end, in characters, in order. Takes linear time."""
    spans: list[tuple[int, int]] = []
    opened: int | None = None
    for tag in TAG.finditer(text):
        if not tag.group(1):
            opened = tag.start() if opened is None else opened
            continue
        if opened is None:
            spans, opened = [], 0
        spans.append((opened, tag.end()))
        opened = None
    return spans if opened is None else [*spans, (opened, len(text))]


def strip_thinking(text: str) -> str:
    """`text` without its thinking blocks."""
    visible, place = [], 0
    for start, end in thinking_spans(text):
        visible.append(text[place:start])
        place = end
    return "".join([*visible, text[place:]])


def opened_at_end(text: str) -> str:
    """The opening tag that ends a prompt, with the blanks after it: its answer begins inside a block. Empty: there is none.

    A tag elsewhere in a prompt is somebody's words.
    """
    stripped = text.rstrip()
    first = max(0, len(stripped) - _LONGEST_TAG)
    tag = _LAST_TAG.search(stripped[first:])
    return "" if tag is None or tag.group(1) else text[first + tag.start() :]

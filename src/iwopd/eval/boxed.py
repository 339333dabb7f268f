r"""The answer of a completion: the last box outside of any thinking block.

Rules:

- Text in `<think>...</think>` does not count (`data/thinking.py`).
- Only the last box counts. Models box intermediate results, and a list of boxed guesses must not earn more than one guess.
- A last box that is never closed is no answer, and the box before it is not used: the text was cut off while the model
  stated its answer, perhaps a new one. Using the earlier box would reward running into the length limit.
- `\boxed`, `\fbox` and `\framebox` are boxes. Without braces the argument is one token, as in LaTeX: `\boxed 5`, `\boxed\pi`. A
  command without such an argument ("put it in \boxed notation") is not a box.
- Of nested boxes the outermost counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from iwopd.data.thinking import strip_thinking

_BOX = re.compile(r"\\(?:boxed|fbox|framebox(?:\s*\[[^\]\[{}]*\]){0,2})(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character is consumed, so `\{` is no brace and `\\{` is one
_BARE_TOKEN = re.compile(r"\\[a-zA-Z]+|\d|[a-zA-Z](?![a-zA-Z])")
_BARE_WORD = re.compile(r"\\(?:text|mathrm|frac|dfrac|tfrac|sqrt|left|begin|boxed|fbox|framebox)$")


@dataclass(frozen=True)
class Boxed:
    """The answer of a completion; None if there is none, and then `why` gives the reason."""

    answer: str | None
    why: str


def last_boxed(text: str) -> Boxed:
    """The content of the last box outside thinking blocks, stripped of surrounding spaces. Takes linear time."""
    visible = strip_thinking(text)
    if (first := _BOX.search(visible)) is None:
        return Boxed(None, _why_no_box(text, visible))
    closing = _closing_braces(visible, first.start())
    answer: str | None = None
    cut = False  # the last box so far is never closed
    position = first.start()
    while (command := _BOX.search(visible, position)) is not None:
        position = command.end()
        if visible.startswith("{", position):
            end = closing.get(position)
            cut = end is None
            if end is not None:
                answer, position = visible[position + 1 : end], end + 1
        elif (token := _BARE_TOKEN.match(visible, position)) is not None and not _BARE_WORD.match(token.group()):
            answer, cut, position = token.group(), False, token.end()
    if cut:
        return Boxed(None, r"the last \boxed{ is never closed: the text was cut off inside its answer")
    if answer is None:
        return Boxed(None, r"no \boxed{} in the text, only the command without an argument")
    answer = answer.strip(" \t\r\n")  # keep form feeds and the like: they are lost backslashes
    if not answer:
        return Boxed(None, r"the last \boxed{} is empty")
    return Boxed(answer, "")


def _closing_braces(text: str, start: int) -> dict[int, int]:
    """Where each opening brace from `start` on is closed. One pass, so the time is linear even for a text of open boxes."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _why_no_box(text: str, visible: str) -> str:
    if not text.strip():
        return "the completion is empty"
    if "\x08oxed" in visible:
        return r"no \boxed{} in the text, but a backspace character before 'oxed': its backslash was lost"
    if _BOX.search(text):
        return r"no \boxed{} in the text outside of thinking blocks"
    return r"no \boxed{} in the text"

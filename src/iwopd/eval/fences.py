"""From a model's answer to a program: its fenced code blocks. Every step takes time linear in the text."""

from __future__ import annotations

import re

_OPENING = re.compile(r"[ \t]*+```[ \t]*+([\w+-]*+)")  # possessive: nothing is tried twice
_PYTHON = ("", "python", "python3", "py")


def extract_code(text: str, entry_point: str = "") -> str:
    """The program in a model's answer: the last fenced Python block that defines `entry_point`, or else the text as it is.
    Without an entry point it is the last one.

    The last, because models think first and answer last. A block counts as Python when its fence says so or says nothing; one
    that was cut off before its closing fence counts too.
    """
    blocks = [block for language, block in _blocks(text) if language.lower() in _PYTHON]
    return next((block for block in reversed(blocks) if not entry_point or defines(block, entry_point)), text)


def defines(source: str, name: str) -> bool:
    """Whether a line of it begins with the definition of `name`: a function, a class or an assignment."""
    escaped = re.escape(name)
    definition = rf"^(?:(?:async\s++)?def|class)\s++{escaped}\b|^{escaped}\s*+="
    return re.search(definition, source, re.MULTILINE) is not None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every block, line by line: an opening fence, and all up to a line that holds a fence alone."""
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    start = place = 0
    while (end := text.find("\n", place)) >= 0:
        if language is None:
            if (opening := _OPENING.match(text, place, end)) is not None:
                language, start = opening.group(1), end + 1
        elif text[place:end].strip(" \t") == "```":
            blocks.append((language, text[start:place]))
            language = None
        place = end + 1
    if language is not None:  # the last line closes it, or it was cut off
        blocks.append((language, text[start:place] if text[place:].strip(" \t") == "```" else text[start:]))
    return blocks

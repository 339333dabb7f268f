"""What is wrong with a value, in words for the person who wrote it: `pydantic` has its own, for programmers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

WHOLE = "must be a whole number"
NUMBER = "must be a number"
YES_OR_NO = "must be true or false"
TEXT = "must be a text"
TABLE = "must be a table of names and values, such as {gamma = 0.5}"
LONGEST = 200
"""Letters of a wrong value that are repeated."""

_FIXED = {
    "bool_parsing": YES_OR_NO,
    "bool_type": YES_OR_NO,
    "int_parsing": WHOLE,
    "int_type": WHOLE,
    "int_from_float": WHOLE,
    "int_parsing_size": "is too large a number",
    "float_parsing": NUMBER,
    "float_type": NUMBER,
    "finite_number": "must be a finite number",
    "string_type": TEXT,
    "dict_type": TABLE,
    "model_type": TABLE,
    "model_attributes_type": TABLE,
    "list_type": "must be a list, such as ['a', 'b']",
    "tuple_type": "must be a list of numbers, such as [0.9, 0.999]",
    "too_long": "has more values than there are places",
    "missing": "is needed and not there",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_unicode": "has letters that are no Unicode",
}
_BOUNDS: dict[str, tuple[str, str]] = {
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be at most {}"),
}


def in_words(fault: Mapping[str, Any]) -> str:
    """What one of the errors of a `ValidationError` says."""
    kind, context = str(fault.get("type")), fault.get("ctx") or {}
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context.get(name)
        return words.format(f"{bound:g}" if isinstance(bound, float) else bound)
    if kind == "literal_error":
        return _choices(str(context.get("expected", "")), fault.get("input"))
    return _FIXED.get(kind, str(fault["msg"]).removeprefix("Value error, "))


def _choices(expected: str, given: Any) -> str:
    """`expected` as pydantic lists it: 'a', 'b' or 'c'."""
    names = [name.strip("'") for part in expected.split(", ") for name in part.split(" or ")]
    near = difflib.get_close_matches(given, names, n=1) if isinstance(given, str) else []
    must = f"must be {expected}" if len(names) < 3 else f"must be one of {expected}"
    return f"{must}; did you mean {near[0]!r}?" if near else must


def shown(value: Any) -> str:
    """A wrong value, as it was written, or the beginning of it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} letters)"

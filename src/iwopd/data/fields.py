"""Fields of a record by name, and filters: `difficulty >= 6 and topic != 'geometry'`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from iwopd.errors import UserError


class DataError(UserError, ValueError):
    """Data that cannot be used, with the line and the field."""


OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "in": lambda value, many: value in many,
}


def lookup(item: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or None; dots descend into nested records (`reward_model.ground_truth`)."""
    if name in item:
        return item[name]
    value: Any = item
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class Condition:
    field: str
    operator: str
    value: Any

    def holds(self, item: Mapping[str, Any], where: str) -> bool:
        """Whether a record matches. An empty field matches no condition; a field that the record lacks is an error."""
        if self.field not in item and self.field.partition(".")[0] not in item:
            raise DataError(f"{where}: the filter asks for the field {self.field!r}; the record has {sorted(item)}")
        value = lookup(item, self.field)
        if value is None:
            return False
        try:
            return bool(OPERATORS[self.operator](value, self.value))
        except TypeError:
            raise DataError(
                f"{where}: the filter compares {self.field} = {value!r} ({type(value).__name__}) with {self.value!r} "
                f"({type(self.value).__name__})"
            ) from None


def parse_filter(text: str) -> tuple[Condition, ...]:
    """Conditions `field operator value`, joined by `and`. Values are numbers, quoted texts or lists of them."""
    conditions = []
    joined, position = "and", 0
    while joined:
        match = _CONDITION.match(text, position)
        if match is None:
            part = text[position:].strip()
            raise DataError(f"cannot read the filter {part!r}; it looks like: difficulty >= 6 and ability == 'code'")
        name, sign, literal, joined = match.groups()
        position = match.end()
        conditions.append(Condition(name, sign, _value(name, sign, literal.strip())))
    return tuple(conditions)


_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_CONDITION = re.compile(
    rf"""\s*([\w.-]+)\s*(>=|<=|==|!=|>|<|\bin\b)\s*((?:{_QUOTED}|(?!\band\b)[^'"])+)(\band\b|\Z)""", re.DOTALL
)
"""Field, operator, value, and the `and` after it: the first one outside quotes."""


def _value(name: str, sign: str, literal: str) -> Any:
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        hint = "conditions are joined by 'and' only" if re.search(r"\bor\b", literal) else "texts need quotes"
        raise DataError(f"filter on {name!r}: {literal[:80]} is not a number, quoted text or list; {hint}") from None
    if sign == "in" and not isinstance(value, (list, tuple)):
        raise DataError(f"filter on {name!r}: 'in' needs a list, e.g. {name} in [{literal}]")
    return value

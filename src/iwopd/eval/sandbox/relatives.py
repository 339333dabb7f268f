"""Values that are no plain data but equal some: what they are sent as.

`==` looks through a subclass of a builtin type (a namedtuple is its tuple, an IntEnum its int), through the views of a dict,
`bytearray`, `memoryview`, `UserList` and their kin. So does EvalPlus. A subclass's own `__eq__` does not count here.
"""

from __future__ import annotations

import sys
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

_SUBCLASSED: list[tuple[type, Callable[[Any], Any]]] = [  # the builtins' own methods: a subclass may override them
    (int, lambda value: int.__index__(value)),
    (str, lambda value: str.__str__(value)),
    (float, lambda value: float.fromhex(float.hex(value))),
    (complex, lambda value: complex.__pos__(value)),
    (bytes, lambda value: bytes(memoryview(value))),
    (bytearray, lambda value: bytes(memoryview(value))),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (UserList, lambda value: list(value.data)),
    (UserString, lambda value: str(value.data)),
    (UserDict, dict),
    (ChainMap, dict),
    (MappingProxyType, dict),
]
_VIEWS: set[type] = {type({}.keys()), type({}.items()), type(OrderedDict().keys()), type(OrderedDict().items())}


def plain(value: Any) -> Any:
    """Plain data that equals `value`, which is of another type; `value` itself if there is none."""
    kind = type(value)
    for builtin, convert in _SUBCLASSED:
        if issubclass(kind, builtin):
            return convert(value)
    if kind in _VIEWS:
        try:
            return set(value)
        except TypeError:  # an item that cannot be in a set: equal to no set
            return value
    if kind is memoryview and value.format == "B" and value.ndim == 1:
        return bytes(value)
    return value


def ratio(value: Any) -> tuple[int, int] | float | None:
    """A Fraction or Decimal as numerator and denominator without a common factor, or as an infinite float; else None."""
    kind = type(value)
    if any(name in sys.modules and issubclass(kind, getattr(sys.modules[name], of)) for name, of in _EXACT):
        if kind.__module__ != "fractions" and value.is_infinite():
            return float(value)
        if kind.__module__ != "fractions" and value.is_nan():
            return None
        numerator, denominator = value.as_integer_ratio()
        return int(numerator), int(denominator)
    return None


_EXACT = (("fractions", "Fraction"), ("decimal", "Decimal"))  # looked up, not imported: most programs do without

"""Values from a hostile sender, held so that comparing them takes linear time.

Whoever chooses the keys of a hash table can make them collide: a set of 800 frozensets of colliding integers keeps the
interpreter busy for a minute, with its lock held. So a set or dict from the sandbox stays a list of its elements, a `Bag`, and
two of them are compared by digests of their elements: SHA-256 of a canonical form, which is equal for equal values (1, 1.0 and
True) and for no others.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_F64 = struct.Struct("<d")
_U64 = struct.Struct("<Q")


class _NothingEqualError(Exception):
    """The value equals nothing, not even itself (NaN, an opaque object), or is no value (a set with an element twice)."""


class Bag:
    """A set, a frozenset or a dict as it was sent. Equal to what it would be equal to; goes into no hash table."""

    __slots__ = ("items", "kind")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: type, items: Sequence[Any]) -> None:
        self.kind = kind
        self.items = items
        """Elements, or pairs of key and value."""

    def __eq__(self, other: object) -> bool:
        return type(other) in (Bag, set, frozenset, dict) and same(self, other)

    def __len__(self) -> int:
        return len(self.items)

    def keys(self) -> list[Any]:
        """What iterating over the set or dict gives."""
        return [pair[0] for pair in self.items] if self.kind is dict else list(self.items)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A Fraction or Decimal. The sender must have reduced it: we do not, because that takes more than linear time."""

    numerator: int
    denominator: int

    def __eq__(self, other: object) -> bool:
        return same(self, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Related:
    """A result whose type is not that of `value`, but whose relative it is. Equal alike, but no tolerance applies to it."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other)

    __hash__ = None  # type: ignore[assignment]


def same(one: Any, other: Any) -> bool:
    """`==`, in linear time whatever the values are."""
    try:
        return digest(one) == digest(other)
    except _NothingEqualError:
        return False


def same_elements(result: Any, expected: Iterable[Any]) -> bool:
    """`set(result) == set(expected)`; False where that raises."""
    found = result.keys() if isinstance(result, Bag) else result
    if not isinstance(found, list | tuple | str | bytes) or not all(map(_hashable, found)):
        return False
    try:
        return set(map(digest, found)) == set(map(digest, expected))
    except _NothingEqualError:
        return False


def built(value: Any) -> Any:
    """The value with real sets and dicts. For those that can be trusted."""
    kind = type(value)
    if kind is Related:
        return built(value.value)
    if kind is list or kind is tuple:
        return kind(map(built, value))
    if kind is Bag:
        return value.kind((built(key), built(item)) for key, item in value.items) if value.kind is dict else value.kind(
            map(built, value.items)
        )  # fmt: skip
    return value


def digest(value: Any) -> bytes:
    """SHA-256 of the canonical form."""
    out = bytearray()
    _write(value, out)
    return hashlib.sha256(out).digest()


def _write(value: Any, out: bytearray) -> None:
    kind = type(value)
    if kind is str or kind is bytes:
        data = value if kind is bytes else value.encode("utf-8", "surrogatepass")
        _sized(b"B" if kind is bytes else b"S", data, out)
    elif kind is int or kind is bool:
        _integer(int(value), out)
    elif kind is float:
        _float(value, out)
    elif value is None:
        out += b"N"
    elif kind is list or kind is tuple:
        out += (b"L" if kind is list else b"U") + _U64.pack(len(value))
        for item in value:
            _write(item, out)
    elif kind is Ratio:
        _ratio(value.numerator, value.denominator, out)
    elif kind is complex:
        if value.imag != 0.0:
            out += b"C"
            _float(value.imag, out)
        _float(value.real, out)
    elif kind is dict or (kind is Bag and value.kind is dict):
        pairs = value.items() if kind is dict else value.items
        _unordered(b"M", [digest(key) for key, _ in pairs], [digest(item) for _, item in pairs], out)
    elif kind in (set, frozenset, Bag):
        _unordered(b"E", [digest(item) for item in (value.items if kind is Bag else value)], None, out)
    else:
        raise _NothingEqualError


def _unordered(tag: bytes, keys: list[bytes], values: list[bytes] | None, out: bytearray) -> None:
    if len(set(keys)) != len(keys):
        raise _NothingEqualError
    out += tag + _U64.pack(len(keys))
    out += b"".join(sorted(keys if values is None else map(bytes.__add__, keys, values)))


def _sized(tag: bytes, data: bytes, out: bytearray) -> None:
    out += tag + _U64.pack(len(data))
    out += data


def _integer(value: int, out: bytearray) -> None:
    _sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), out)


def _float(value: float, out: bytearray) -> None:
    if value != value:
        raise _NothingEqualError
    if value.is_integer():
        _integer(int(value), out)
    elif value in (float("inf"), float("-inf")):
        out += b"D" + _F64.pack(value)
    else:
        _ratio(*value.as_integer_ratio(), out)


def _ratio(numerator: int, denominator: int, out: bytearray) -> None:
    if denominator != 1:
        out += b"Q"
        _integer(denominator, out)
    _integer(numerator, out)


def _hashable(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(map(_hashable, value))
    return kind not in (list, dict, set) and not (kind is Bag and value.kind is not frozenset)

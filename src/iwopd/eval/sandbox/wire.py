"""The format of all messages across the sandbox's boundary: plain typed data, encoded by tag, decoded strictly.

Nothing here can run code: no pickle, no eval, no import by name. Only the exact builtin types are sent, and what equals one of
them as such (`relatives`); any other object arrives as `Opaque`, which equals nothing. Both directions enforce `Limits`,
because the other side may be hostile: sizes, depth and counts are checked before memory is allocated, and no hash table is
built from keys that it chose (`unbuilt`).

    value  := N | T | F                              None, True, False
            | I u32 bytes                            int, little-endian two's complement
            | D f64 | C f64 f64                      float, complex
            | Q value value                          Fraction or Decimal: numerator and denominator, both int
            | S u32 utf-8 | B u32 bytes | O u32 utf-8   str, bytes, opaque (the type's name)
            | (L | U | E | Z) u32 value*             list, tuple, set, frozenset
            | M u32 (value value)*                   dict, in its order
"""

from __future__ import annotations

import hashlib
import marshal
import struct
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .relatives import plain, ratio
from .unbuilt import Bag, Ratio

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_OPAQUE_NAME = 200


class WireError(ValueError):
    """Data that this format cannot encode, or bytes that are not in this format."""


@dataclass(frozen=True)
class Limits:
    """What one message may hold."""

    size: int = 4 << 20
    """Bytes."""
    nodes: int = 200_000
    """Values, including nested ones. A value costs the reader at most some 100 bytes."""
    depth: int = 64
    int_bytes: int = 1 << 20
    build: bool = False
    """Whether sets and dicts are built. Else each arrives as a `Bag`: the sender chooses the keys, and they could collide."""


RESULT = Limits()
"""From the sandbox: small enough to be safe for the reader."""
JOB = Limits(size=256 << 20, nodes=20_000_000, build=True)
"""Into the sandbox, or between trusted parties."""


class Opaque:
    """Replaces an object whose type cannot be sent. It equals nothing, not even itself."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<{self.name} object>"


def encode(value: Any, limits: Limits = RESULT) -> bytes:
    """Encode `value`. Objects of other types become opaque; exceeding a limit raises `WireError`."""
    return _Encoder(limits).run(value)


def encode_plain(value: Any, limits: Limits = JOB) -> bytes:
    """As `encode`, but an object of another type raises `WireError` with its type and position."""
    return _Encoder(limits, plain=True).run(value)


def decode(data: bytes | bytearray | memoryview, limits: Limits = RESULT) -> Any:
    """Decode exactly these bytes, or raise `WireError`."""
    if len(data) > limits.size:
        raise WireError(f"message of {len(data)} bytes, the limit is {limits.size}")
    decoder = _Decoder(memoryview(data), limits)
    value = decoder.value(0)
    if decoder.at != len(data):
        raise WireError(f"{len(data) - decoder.at} bytes left over after the value")
    return value


class _Walk:
    """What encoding and decoding have in common: the limits on a value and all that is in it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.nodes = 0

    def enter(self, depth: int) -> None:
        self.nodes += 1
        if self.nodes > self.limits.nodes:
            raise WireError(f"more than {self.limits.nodes} values")
        if depth > self.limits.depth:
            raise WireError(f"nested deeper than {self.limits.depth}")


class _Encoder(_Walk):
    def __init__(self, limits: Limits, plain: bool = False) -> None:
        super().__init__(limits)
        self.plain, self.out = plain, bytearray()

    def run(self, value: Any) -> bytes:
        self.value(value, 0, "value")
        if len(self.out) > self.limits.size:
            raise WireError(f"value of {len(self.out)} bytes, the limit is {self.limits.size}")
        return bytes(self.out)

    def value(self, value: Any, depth: int, where: str) -> None:
        self.enter(depth)
        if len(self.out) > self.limits.size:
            raise WireError(f"larger than {self.limits.size} bytes")
        kind = type(value)  # exact types only: a subclass can override anything
        if value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"T" if value else b"F"
        elif kind is int:
            length = value.bit_length() // 8 + 1
            if length > self.limits.int_bytes:
                raise WireError(f"int of {length} bytes, the limit is {self.limits.int_bytes}")
            self._bytes(b"I", value.to_bytes(length, "little", signed=True))
        elif kind is float:
            self.out += b"D" + _F64.pack(value)
        elif kind is complex:
            self.out += b"C" + _C128.pack(value.real, value.imag)
        elif kind is str:
            self._text(b"S", value)
        elif kind is bytes:
            self._bytes(b"B", value)
        elif kind is dict:
            self.out += b"M" + _U32.pack(len(value))
            for key, item in value.items():
                self.value(key, depth + 1, f"key of {where}")
                self.value(item, depth + 1, f"{where}[{key!r:.40}]")
        elif kind in _TAGS:
            self.out += _TAGS[kind] + _U32.pack(len(value))
            for place, item in enumerate(value):
                self.value(item, depth + 1, f"{where}[{place}]")
        elif (other := value if self.plain else plain(value)) is not value:
            self.value(other, depth, where)
        elif not self.plain and (number := ratio(value)) is not None:
            self._ratio(number, depth)
        elif self.plain:
            raise WireError(f"{where} is a {kind.__module__}.{kind.__qualname__}; only plain data can be passed")
        else:
            self._text(b"O", str(kind.__name__)[:_OPAQUE_NAME])

    def _ratio(self, number: tuple[int, int] | float, depth: int) -> None:
        self.out += b"" if isinstance(number, float) else b"Q"
        for part in (number,) if isinstance(number, float) else number:
            self.value(part, depth + 1, "number")

    def _text(self, tag: bytes, text: str) -> None:
        if len(text) > self.limits.size:
            raise WireError(f"str of {len(text)}, the limit is {self.limits.size} bytes")
        self._bytes(tag, text.encode("utf-8", "surrogatepass"))

    def _bytes(self, tag: bytes, data: bytes) -> None:
        if len(data) > self.limits.size:
            raise WireError(f"{len(data)} bytes, the limit is {self.limits.size}")
        self.out += tag + _U32.pack(len(data))
        self.out += data


_TAGS: dict[type, bytes] = {list: b"L", tuple: b"U", set: b"E", frozenset: b"Z"}
_KINDS: dict[int, type] = {ord("L"): list, ord("U"): tuple, ord("E"): set, ord("Z"): frozenset}


class _Decoder(_Walk):
    def __init__(self, data: memoryview, limits: Limits) -> None:
        super().__init__(limits)
        self.data, self.at = data, 0

    def value(self, depth: int, key: bool = False) -> Any:
        """The next value; `key`: it is an element of a set or a key of a dict, or in one."""
        self.enter(depth)
        tag = self._take(1)[0]
        if key and tag in b"LEM":
            raise WireError("a list, set or dict as an element or key: unhashable")
        if tag == _N:
            return None
        if tag in (_T, _F):
            return tag == _T
        if tag == _I:
            data = self._sized(self.limits.int_bytes)
            if not data:
                raise WireError("int without bytes")
            return int.from_bytes(data, "little", signed=True)
        if tag == _S:
            return self._text(self.limits.size)
        if tag == _D:
            return _F64.unpack(self._take(8))[0]
        if tag in _KINDS:
            hashed = tag in b"EZ"
            items = [self.value(depth + 1, key or hashed) for _ in range(self._count(1))]
            return self._table(_KINDS[tag], items) if hashed else _KINDS[tag](items)
        if tag == _M:
            return self._table(dict, [(self.value(depth + 1, True), self.value(depth + 1)) for _ in range(self._count(2))])
        if tag == _C:
            return complex(*_C128.unpack(self._take(16)))
        if tag == _B:
            return bytes(self._sized(self.limits.size))
        if tag == _Q:
            numerator, denominator = self.value(depth + 1), self.value(depth + 1)
            if type(numerator) is not int or type(denominator) is not int or denominator < 1:
                raise WireError("a ratio of something else than an int and a positive int")
            return Ratio(numerator, denominator)
        if tag == _O:
            return Opaque(self._text(4 * _OPAQUE_NAME))
        raise WireError(f"unknown tag {tag} at byte {self.at - 1}")

    def _table(self, kind: type, items: list[Any]) -> Any:
        if not self.limits.build:
            return Bag(kind, items)
        made = kind(items)
        if len(made) != len(items):
            raise WireError(f"{kind} with an element twice")
        return made

    def _count(self, least: int) -> int:
        count = int(_U32.unpack(self._take(4))[0])
        if count * least > len(self.data) - self.at:  # an element takes at least a byte: refuse before allocating
            raise WireError(f"{count} elements announced, {len(self.data) - self.at} bytes left")
        return count

    def _text(self, limit: int) -> str:
        try:
            return str(self._sized(limit), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(f"str that is not UTF-8: {error}") from None

    def _sized(self, limit: int) -> memoryview:
        length = int(_U32.unpack(self._take(4))[0])
        if length > limit:
            raise WireError(f"{length} bytes announced, the limit is {limit}")
        return self._take(length)

    def _take(self, length: int) -> memoryview:
        end = self.at + length
        if end > len(self.data):
            raise WireError(f"message ends at byte {len(self.data)}, {end} were announced")
        start, self.at = self.at, end
        return self.data[start:end]


_N, _T, _F, _I, _D, _C, _Q, _S, _B, _O, _M = b"NTFIDCQSBOM"


def digest(value: Any) -> bytes:
    """SHA-256 of a list, tuple, str or bytes that is too large to send. Equal values have equal digests (1, 1.0 and True).

    A program can claim any digest, but only the right result has the right one.
    """
    kind = type(value)
    if kind is str or kind is bytes:
        data = value if kind is bytes else value.encode("utf-8", "surrogatepass")
        return hashlib.sha256((b"B" if kind is bytes else b"S") + data).digest()
    if kind is not list and kind is not tuple:
        raise WireError(f"a {kind.__name__} larger than {RESULT.size} bytes or {RESULT.nodes} values")
    sha = hashlib.sha256(_TAGS[kind] + len(value).to_bytes(8, "little"))
    for start in range(0, len(value), 4096):
        # In version 2 of the format the bytes depend on the values alone (not so in later ones). marshal only writes here.
        sha.update(marshal.dumps(_normal_items(value[start : start + 4096], 0), 2))
    return sha.digest()


_SETTLED = {int, str, bytes, type(None)}  # equal only to values of their own type


def _normal_items(items: Any, depth: int) -> Any:
    """The items with equal numbers made identical. Types are checked in bulk first: there may be 1e8 items."""
    if depth > RESULT.depth:
        raise WireError(f"nested deeper than {RESULT.depth}")
    kinds = set(map(type, items))
    if kinds <= _SETTLED:
        return items
    if kinds <= {list, tuple} and set(map(type, chain.from_iterable(items))) <= _SETTLED:
        return items
    return type(items)([_normal(item, depth) for item in items])


def _normal(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _SETTLED:
        return value
    if kind is list or kind is tuple:
        return _normal_items(value, depth + 1)
    if kind is complex and value.imag == 0.0:
        value, kind = value.real, float
    if kind is bool or (kind is float and value.is_integer()):
        return int(value)
    if (kind is float or kind is complex) and value == value:
        return value
    raise WireError(f"a {kind.__name__} ({str(value)[:20]}) in a result this large")

"""The header of a GGUF file, parsed once in a process, and quickly.

A header holds the whole vocabulary and its merges: hundreds of thousands of strings. transformers has it parsed anew for a
config, twice for a tokenizer and again for the weights, and gguf's reader makes several numpy objects of every string. Here the
reader takes a list of strings or numbers in one go, and is kept for whoever asks for the same file next.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

KEPT = 4
"""Headers that are kept: those of student, teacher and reference, and one more."""
LIST = struct.Struct("=IQ")
"""What stands before the items of a list: their kind and their number."""
LENGTH = struct.Struct("=Q")


class _Text(bytes):
    """A string of the header, as small as it can be; numpy's arrays, which it stands for, have this method."""

    __slots__ = ()

    def tobytes(self) -> bytes:
        return bytes(self)


@contextmanager
def parsed_once() -> Iterator[None]:
    """While it is open, whoever takes a reader from the package gguf (as transformers does) gets the kept one."""
    package: Any = importlib.import_module("gguf")
    original = _reader_class().__base__
    package.GGUFReader = open_gguf
    try:
        yield
    finally:
        package.GGUFReader = original


def open_gguf(path: str | os.PathLike[str], mode: str = "r") -> Any:
    """A `gguf.GGUFReader` of the file; the same one until the file changes."""
    if mode != "r":
        return _reader_class()(path, mode)
    file = Path(path).resolve()
    about = file.stat()
    return _kept(str(file), about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=KEPT)
def _kept(path: str, size: int, changed: int) -> Any:
    return _reader_class()(path)


@cache
def _reader_class() -> Any:
    """The package's reader with another way to read lists. Made when it is needed: the package is an extra."""
    package: Any = importlib.import_module("gguf")
    kinds, usual = package.GGUFValueType, package.GGUFReader._get_field_parts

    def get_field_parts(self: Any, orig_offs: int, raw_type: int) -> Any:
        """Bytes that it takes, parts, places of the values among them, types; lists of strings and numbers in one go."""
        if raw_type != kinds.ARRAY or self.byte_order != "I":  # of a machine with another byte order
            return usual(self, orig_offs, raw_type)
        data = memoryview(self.data)
        try:
            kind, count = LIST.unpack_from(data, orig_offs)
            number = self.gguf_scalar_to_np.get(kinds(kind))
            if not count or (kind != kinds.STRING and number is None):
                return usual(self, orig_offs, raw_type)
            first = orig_offs + LIST.size
            items, size = _strings(data, first, count) if number is None else _numbers(data, first, count, np.dtype(number))
        except struct.error:
            raise ValueError("its header ends too early: the download is incomplete") from None
        parts = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        places = list(range(len(parts), len(parts) + count))
        return LIST.size + size, [*parts, *items], places, [kinds.ARRAY, kinds(kind)]

    return type("QuickReader", (package.GGUFReader,), {"_get_field_parts": get_field_parts})


def _strings(data: memoryview, first: int, count: int) -> tuple[list[Any], int]:
    """The strings that begin at a place of the file, and the bytes that they take."""
    found: list[Any] = []
    place = first
    for _ in range(count):
        start = place + LENGTH.size
        place = start + LENGTH.unpack_from(data, place)[0]
        found.append(_Text(data[start:place]))
    if place > len(data):
        raise struct.error
    return found, place - first


def _numbers(data: memoryview, first: int, count: int, kind: np.dtype[Any]) -> tuple[list[Any], int]:
    """Numbers, each as an array [1]."""
    size = count * kind.itemsize
    if first + size > len(data):
        raise struct.error
    values = np.frombuffer(data[first : first + size], dtype=kind)
    return [values[place : place + 1] for place in range(count)], size

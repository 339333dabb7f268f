"""Where a student comes from: its name on the hub and its licence, as far as the files here say. Nothing is downloaded."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import metadata_load, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from iwopd.models import ModelSource

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
"""How the hub's cache calls the folder of a repository."""
LARGEST = 2**16
"""Bytes of a text in a GGUF header that is read; what is longer is no name."""
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of GGUF's plain types, by number."""
TEXT = 8


@dataclass(frozen=True)
class Origin:
    name: str | None = None
    """Hub id; None: not known."""
    licence: str | None = None
    """As the hub calls it: apache-2.0, mit, other, ..."""


@cache
def origin(source: ModelSource) -> Origin:
    """Of a model; asked at every checkpoint, so files are read once."""
    folder = Path(source.path)
    if not source.is_local:
        return _of_hub(source)
    if source.gguf_file is not None and (found := _of_gguf(folder / source.gguf_file)) != Origin():
        return found
    about = _card(folder / "README.md")
    cached = CACHED.search(str(folder.absolute()))
    name = "/".join(cached.groups()) if cached else _hub_id(about.get("base_model"))
    return Origin(name, _text(about.get("license")))


def _of_hub(source: ModelSource) -> Origin:
    if not HUB_ID.fullmatch(source.path) and "/" in source.path:
        return Origin()
    try:
        card = try_to_load_from_cache(source.path, "README.md", revision=source.revision)
    except HFValidationError:
        return Origin()
    return Origin(source.path, _text(_card(Path(card)).get("license")) if isinstance(card, str) else None)


def _card(path: Path) -> dict[str, Any]:
    """What a model card says to the hub."""
    try:
        return metadata_load(path) or {}
    except Exception:  # whatever YAML finds wrong with somebody else's file: it only names things
        return {}


def _of_gguf(path: Path) -> Origin:
    try:
        with path.open("rb") as file:
            general = _general(file)
    except (OSError, ValueError, struct.error):
        return Origin()
    url = general.get("general.base_model.0.repo_url") or general.get("general.source.repo_url") or ""
    return Origin(_hub_id(url.removeprefix("https://huggingface.co/")), _text(general.get("general.license")))


def _general(file: BinaryIO) -> dict[str, str]:
    """The texts of a GGUF header that are about the model as a whole. They come first: lists of tokens are not read."""
    if file.read(4) != b"GGUF":
        raise ValueError("not a GGUF file")
    _, _, count = struct.unpack("<IQQ", file.read(20))
    found = {}
    for _ in range(count):
        key = _string(file)
        if key.startswith("tokenizer."):
            break
        (kind,) = struct.unpack("<I", file.read(4))
        if kind == TEXT:
            found[key] = _string(file)
        else:
            _skip(file, kind)
    return found


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > LARGEST:
        file.seek(length, 1)
        return ""
    return file.read(length).decode(errors="replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind in SIZES:
        file.seek(SIZES[kind], 1)
        return
    inner, length = struct.unpack("<IQ", file.read(12))
    if inner in SIZES:
        file.seek(SIZES[inner] * length, 1)
        return
    for _ in range(length):
        _string(file)


def _hub_id(value: Any) -> str | None:
    """A hub id, or the first of several; not a path of some machine."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) and HUB_ID.fullmatch(first) else None


def _text(value: Any) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) and first else None

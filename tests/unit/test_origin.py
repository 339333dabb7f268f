"""Where a student comes from, by its files alone."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from iwopd.filesystem import follow_umask
from iwopd.models import ModelSource
from iwopd.train.origin import Origin, origin


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, *, tokens: bytes = b"") -> None:
    """A header as llama.cpp writes it, cut off where the tokens would begin."""
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.file_type") + struct.pack("<II", 4, 7),
        text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("general.sizes") + struct.pack("<IIQ", 9, 4, 3) + bytes(12),
        text("general.license") + struct.pack("<I", 8) + text("apache-2.0"),
        text("general.base_model.0.repo_url") + struct.pack("<I", 8) + text("https://huggingface.co/Owner/Model-1B"),
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) + 1)
    path.write_bytes(header + b"".join(pairs) + text("tokenizer.ggml.tokens") + tokens)


def test_a_gguf_file_names_its_base_and_licence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert origin(ModelSource(str(tmp_path), "model.gguf")) == Origin("Owner/Model-1B", "apache-2.0")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"PK" + bytes(50), b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + b"\xff" * 40]
)
def test_a_damaged_file_names_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert origin(ModelSource(str(tmp_path), "model.gguf")) == Origin()


@pytest.mark.parametrize(
    ("card", "found"),
    [
        ("---\nlicense: mit\nbase_model: Owner/Model\n---\n", Origin("Owner/Model", "mit")),
        ("---\nbase_model: [Owner/Model, Other/Model]\n---\n", Origin("Owner/Model")),
        ("---\nbase_model: /home/me/model\nlicense: 5\n---\n", Origin()),  # a path of some machine is no name
        ("---\n{\n---\n", Origin()),
        ("no front matter", Origin()),
    ],
)
def test_the_card_beside_a_local_model_is_read(tmp_path: Path, card: str, found: Origin) -> None:
    (tmp_path / "README.md").write_text(card)
    assert origin(ModelSource(str(tmp_path))) == found


def test_a_hub_id_is_its_own_name_and_a_path_is_none() -> None:
    assert origin(ModelSource("Nobody/has-this-in-the-cache")) == Origin("Nobody/has-this-in-the-cache")
    assert origin(ModelSource("/no/such/folder")) == origin(ModelSource("./folder")) == Origin()


def test_files_follow_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch(mode=0o600)
    before = os.umask(0o027)
    try:
        follow_umask(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640

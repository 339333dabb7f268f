"""Files of a model that are not what they should be end in a sentence that names the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from iwopd.models import ModelError, end_ids, load_configs, load_model, load_tokenizer
from iwopd.tiny import build_tokenizer
from models import make_model, save_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, and one as GGUF."""
    folder = tmp_path_factory.mktemp("whole")
    make_model("qwen3").save_pretrained(folder / "model", max_shard_size="20KB")
    build_tokenizer().save_pretrained(folder / "model")
    save_gguf(folder / "gguf")
    return folder


NOT_JSON = (b"", b"{", b"\xff", b"[" * 100_000)
NOT_OBJECTS = (b"[]", b"3", b"null")
NO_INDEX = (b"{}", b'{"weight_map": null}', b'{"weight_map": {"a": 3}}', b'{"weight_map": {}, "metadata": 3}')


@pytest.mark.parametrize(
    ("name", "contents", "reader"),
    [
        ("config.json", NOT_JSON + NOT_OBJECTS, load_configs),
        ("config.json", NOT_OBJECTS, load_model),
        ("generation_config.json", NOT_JSON + NOT_OBJECTS, load_configs),
        ("generation_config.json", NOT_OBJECTS, load_model),
        ("tokenizer_config.json", NOT_JSON + NOT_OBJECTS, load_tokenizer),
        ("model.safetensors.index.json", NOT_JSON + NOT_OBJECTS + NO_INDEX, load_model),
    ],
)
def test_json_files(tmp_path: Path, whole: Path, name: str, contents: tuple[bytes, ...], reader: Any) -> None:
    folder = shutil.copytree(whole / "model", tmp_path / "model")
    for content in contents:
        (folder / name).write_bytes(content)
        with pytest.raises(ModelError, match=f"{folder}: {name} (is not|has)"):
            reader(folder)


@pytest.mark.parametrize("reader", [load_configs, load_tokenizer, load_model])
def test_gguf_files(tmp_path: Path, whole: Path, reader: Any) -> None:
    pytest.importorskip("gguf")
    content, file = (whole / "gguf" / "tiny.gguf").read_bytes(), tmp_path / "tiny.gguf"
    huge = (2**60).to_bytes(8, "little")
    for damaged in (
        *(content[:size] for size in (0, 3, 24, 1000, len(content) // 2, len(content) - 100)),
        b"XXXX" + content[4:],
        content[:8] + huge + content[16:],  # tensors
        content[:16] + huge + content[24:],  # keys
        content[:24] + bytes(range(256)) * 20,
    ):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            reader(file)


@pytest.mark.parametrize("given", ["x", {"a": 1}, ["x"], float("inf"), 1.5, True])
def test_stop_ids_that_are_none(given: Any) -> None:
    class Generation:
        eos_token_id = given

    with pytest.raises(ModelError, match=r"eos_token_id in generation_config.json has"):
        end_ids(build_tokenizer(), Generation())

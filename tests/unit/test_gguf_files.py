"""Headers of GGUF files: parsed once, and to the same as gguf's own reader finds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import pytest

from iwopd.config import make_config
from iwopd.gguf_files import open_gguf
from iwopd.models import ModelError, load_configs, load_model, load_tokenizer
from iwopd.train.doctor import examine_recipe
from mismatched import healthy
from models import save_gguf


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose headers were parsed."""
    found: list[str] = []
    original = gguf.GGUFReader.__init__

    def counted(self: Any, path: Any, *rest: Any) -> None:
        found.append(Path(path).name)
        original(self, path, *rest)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    return found


def test_config_tokenizer_and_weights_take_one_parse(tmp_path: Path, parsed: list[str]) -> None:
    save_gguf(tmp_path)
    source = tmp_path / "tiny.gguf"
    load_configs(source)
    load_tokenizer(source)
    load_model(source)
    load_tokenizer(source)
    assert parsed == ["tiny.gguf"]
    assert gguf.GGUFReader.__name__ == "GGUFReader"  # others get the package's own


def test_the_doctor_parses_each_file_of_a_pair_once(tmp_path: Path, parsed: list[str]) -> None:
    settings = healthy(tmp_path)
    for name in ("student", "teacher"):
        save_gguf(tmp_path / "gguf")
        (tmp_path / "gguf" / "tiny.gguf").replace(tmp_path / "gguf" / f"{name}.gguf")
    paths = {name: str(tmp_path / "gguf" / f"{name}.gguf") for name in ("student", "teacher")}
    found = list(examine_recipe(make_config({**settings, "models": paths}), tmp_path / "run", static=True))
    assert not [finding for finding in found if finding.level == "fail"]
    assert sorted(parsed) == ["student.gguf", "teacher.gguf"]


def test_a_file_that_has_changed_is_parsed_again(tmp_path: Path, parsed: list[str]) -> None:
    save_gguf(tmp_path)
    first = open_gguf(tmp_path / "tiny.gguf")
    assert open_gguf(tmp_path / "tiny.gguf") is first
    os.utime(tmp_path / "tiny.gguf", ns=(1, 1))
    assert open_gguf(tmp_path / "tiny.gguf") is not first
    assert len(parsed) == 2


def test_fields_and_tensors_are_those_of_the_packages_reader(tmp_path: Path) -> None:
    save_gguf(tmp_path, quantised=True)
    ours, theirs = open_gguf(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
        assert ours.fields[name].types == field.types, name
    assert [(one.name, one.data_offset, one.data.tobytes()) for one in ours.tensors] == [
        (one.name, one.data_offset, one.data.tobytes()) for one in theirs.tensors
    ]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_header_that_ends_too_early_is_an_incomplete_download(tmp_path: Path, share: float) -> None:
    save_gguf(tmp_path)
    source = tmp_path / "tiny.gguf"
    reader = gguf.GGUFReader(source)
    lists = [reader.fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type")]
    begins, ends = lists[0].offset, lists[1].offset + 5 * len(lists[1].data)
    source.write_bytes(source.read_bytes()[: int(begins + share * (ends - begins))])
    with pytest.raises(ModelError, match="incomplete"):
        load_tokenizer(source)

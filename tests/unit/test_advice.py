"""What `--method auto` refuses, in words, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iwopd.analysis.advice import advised, check_advisable, family_of, with_method
from iwopd.cli import main
from iwopd.config import make_config
from iwopd.errors import ConfigError
from models import byte_tokenizer, save_pair

WORLD = {"models": {"world": "clean"}}
SERVED = {"teacher": {"urls": ["http://localhost:1"]}}
OTHERS = {"teacher": {"others": {"x": {"model": "somewhere"}}}}
REWARD = {"reward": {"checker": "tiny", "normalize": "none"}}
PIECES = {"models": {"world": "clean", "teacher_tokenizer": "pieces"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [(SERVED, "servers"), (OTHERS, "several teachers"), (REWARD, "reward"), (PIECES, "another tokenizer")],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_pairs_that_cannot_be_probed(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--method auto cannot probe this pair: .*{words}.*name a method"):
        check_advisable(make_config({**WORLD, **change}))


def test_folders_with_another_tokenizer(tmp_path: Path) -> None:
    config = make_config(save_pair(tmp_path))
    check_advisable(config)
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_advisable(config)


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="there are 2"):
        check_advisable(make_config(WORLD))


def test_a_teacher_that_is_the_student(tmp_path: Path) -> None:
    settings = save_pair(tmp_path)
    same = {**settings, "models": {"student": str(tmp_path / "student"), "teacher": str(tmp_path / "student")}}
    with pytest.raises(ConfigError, match="hardly differ"):
        advised(make_config(same), lambda _: None)


def test_the_family_is_the_recipes() -> None:
    plain, whole = make_config(WORLD), make_config({**WORLD, "method": {"objective": "divergence"}})
    assert [family_of(one).name for one in (plain, whole)] == ["sampled", "whole"]
    changed = with_method(whole, "survival")
    assert (changed.method.objective, changed.method.weights) == ("policy-gradient", "survival")
    assert changed.models == whole.models


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--engine", "verl"], "--engine verl trains elsewhere"),
        (["--method.weights", "survival"], "--method.weights is a part of it"),
    ],
)
def test_options_that_do_not_go_together(
    given: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[models]\nworld = "clean"\n')
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--method", "auto", *given])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err

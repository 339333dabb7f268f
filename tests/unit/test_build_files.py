"""Dockerfile, its script, the workflows and the READMEs of recipes: they parse, say what is true, and name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import try_versions
from iwopd import cli, recipes
from iwopd.methods import METHODS
from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
INSTALL = ROOT / "docker" / "install.sh"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    "command",
    [
        ["shellcheck", INSTALL],
        ["hadolint", ROOT / "Dockerfile"],
        ["zizmor", "--offline", "--config", ROOT / ".github" / "zizmor.yml", *WORKFLOWS],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS],
    ],
    ids=lambda command: str(command[0]),
)
def test_linters_find_nothing(command: list[str | Path]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_made_by_the_script_and_copies_what_the_build_needs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    runs = re.findall(r"^RUN (.*)", text, flags=re.MULTILINE)
    assert [line.split()[:2] for line in runs if "install" in line] == [
        ["/source/docker/install.sh", "cpu"],
        ["/source/docker/install.sh", "cuda"],
    ]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*)", text, flags=re.MULTILINE) for word in line.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu"], "usage:"),
        (["gpu", "{tmp}/e", "{tmp}"], "the variant is cpu or cuda, not 'gpu'"),
        (["cpu", "{tmp}/e", "{tmp}/none.whl"], "there is no source tree or wheel"),
    ],
)
def test_the_script_refuses_what_it_cannot_do(tmp_path: Path, words: list[str], message: str) -> None:
    done = subprocess.run([INSTALL, *(word.format(tmp=tmp_path) for word in words)], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "e").exists()


def test_the_lower_ends_are_those_of_the_package_and_the_tried_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    pins = dict(pin.split("==") for pin in try_versions.lower_ends())
    assert pins.keys() == needs.keys()
    assert all(f">={low}" in str(needs[name]).split(",") and needs[name].contains(low) for name, low in pins.items())
    for command in try_versions.COMMANDS:
        cli._parser().parse_known_args(command.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--python", "false"], "try_versions: false does not run"),
        (["--environment", "{tmp}/empty", "--out", "{tmp}"], "has no iwopd"),
    ],
)
def test_versions_that_cannot_be_tried(tmp_path: Path, words: list[str], message: str) -> None:
    venv.create(tmp_path / "empty", symlinks=True)
    tool: list[str | Path] = [sys.executable, ROOT / "tools" / "try_versions.py", "--out", tmp_path]
    done = subprocess.run([*tool, *(word.format(tmp=tmp_path) for word in words)], capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_workflows_call_targets_that_exist() -> None:
    made = {target for path in WORKFLOWS for target in re.findall(r"make ([a-z-]+)", path.read_text())}
    assert {"lint", "test", "dist", "docs", "try-versions"} <= made
    assert made <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_folder_of_recipes_has_its_readme_and_names_recipes_that_exist() -> None:
    known = set(recipes.names())
    for folder in {name.partition("/")[0] for name in known}:
        text = (recipes.FOLDER / folder / "README.md").read_text()
        named = set(re.findall(rf"(?<![\w/]){folder}/[\w.-]*\w", text)) - {f"{folder}/README.md"}
        assert named, folder
        assert named <= known, named - known
        reached = re.findall(rf"^\| `{folder}/[\w.-]+` \|(?: \d+\.\d \|)+$", text, flags=re.MULTILINE)
        assert reached or "**Never run here**" in text, folder  # the result stands beside the command
    assert {f"tiny/{name}" for name in METHODS} <= known


def test_a_file_goes_before_a_recipe_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = recipes.FOLDER / "tiny" / "opd.toml"
    assert recipes.find("tiny/opd") == recipes.find("tiny/opd.toml") == packaged
    assert recipes.find("tiny/none") == Path("tiny/none")
    assert recipes.find("opd.toml") == Path("opd.toml")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "opd.toml").write_text("")
    assert recipes.find("tiny/opd.toml") == Path("tiny/opd.toml")

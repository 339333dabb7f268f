"""Wheel and sdist as a stranger gets them: installed without the repository and without any extra, in an empty folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from installed_wheel import ROOT, Installed, build, install, wheel_requirements
from waiting import PATIENCE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SMALL = ["--rollout.prompts_per_step", "4", "--data.train_size", "16", "--eval.prompts", "8", "--threads", "1"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(archives[0], tmp_path_factory.mktemp("installed"))


def test_the_archives_pass_the_checks_of_the_package_index(archives: tuple[Path, Path]) -> None:
    wheel, sdist = map(str, archives)
    for command in (["twine", "check", "--strict", wheel, sdist], ["check_wheel_contents", wheel]):
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_file_of_the_package(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    source = {path.relative_to(ROOT / "src").as_posix() for path in tracked if ".egg-info" not in str(path)}
    assert source - packed == {"iwopd/recipes/paper/generate.py"}
    assert packed <= source


def test_the_sdist_holds_what_it_takes_to_test_and_document(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("constraints.txt", "constraints-vllm.txt", "Makefile", "LICENSE", "CHANGELOG.md", "Dockerfile"):
        assert name in names
    for folder in ("docs", "tests", "bench", "results", "src"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.[mjpt][dsyxo]*") if path.is_file()}
        assert {name for name in files - names if "__pycache__" not in name} == set(), folder


def test_the_long_description_has_no_link_into_the_repository(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        header, _, text = archive.read(name).decode().partition("\n\n")
    assert "Author: iwopd contributors" in header
    assert text.startswith("# iwopd")
    assert "docs/method.md" in text
    tokens = [child for token in MarkdownIt("commonmark").parse(text) for child in [token, *(token.children or ())]]
    targets = [str(value) for token in tokens for key, value in token.attrs.items() if key in ("href", "src")]
    assert [target for target in targets if not target.startswith(("https://", "http://", "#"))] == []
    assert 'src="docs' not in text


def test_it_sees_nothing_of_the_repository(installed: Installed) -> None:
    done = installed.run_python(f"open({str(ROOT / 'README.md')!r})")
    assert "open of the repository" in done.stderr  # the guard works
    where = installed.run_python("import iwopd.recipes, sys; print(iwopd.recipes.FOLDER, *sys.path)").stdout
    assert str(installed.site / "iwopd" / "recipes") in where
    assert str(ROOT) not in where


def test_recipes_are_listed_shown_and_copied(installed: Installed) -> None:
    listed = installed.run("recipes").stdout
    for name in ("tiny/iw-opd ", "mix/cold-start ", "paper/qwen3-0.6b-from-qwen3-4b-instruct-2507-opd-math\n"):
        assert name in listed
    source = ROOT / "src" / "iwopd" / "recipes"
    assert installed.run("recipes", "tiny/iw-opd").stdout == (source / "tiny" / "iw-opd.toml").read_text()
    assert installed.run("recipes", "tiny").stdout == (source / "tiny" / "README.md").read_text()
    installed.run("recipes", "--copy", "all")
    copied = {path.relative_to(installed.folder / "all") for path in (installed.folder / "all").rglob("*.toml")}
    assert copied == {path.relative_to(source) for path in source.rglob("*.toml")}
    assert "exists already" in installed.run("recipes", "--copy", "all", code=2).stderr
    assert "did you mean tiny/iw-opd" in installed.run("recipes", "tiny/iwopd", code=2).stderr


@pytest.mark.slow
def test_train_report_doctor_and_reproduce_work_from_an_empty_folder(installed: Installed) -> None:
    installed.run("recipes", "tiny/iw-opd", "--copy", "my.toml")
    for recipe in ("tiny/iw-opd", "my.toml"):
        assert "2 steps done" in installed.run("train", recipe, "--steps", "2", *SMALL).stdout
    first, second = (installed.folder / "runs" / f"{name}-seed0" / "rollouts.jsonl" for name in ("iw-opd", "my"))
    assert first.read_text() == second.read_text()
    installed.run("report", "runs/iw-opd-seed0", "-o", "page.html")
    assert "IW-OPD" in (installed.folder / "page.html").read_text()
    assert " 0 failed" in installed.run("doctor", "tiny/iw-opd", "--static").stdout
    assert "--read-only" in installed.run("reproduce", "--help").stdout
    assert "source distribution" in installed.run("reproduce", "p1", "--read-only").stdout


@pytest.mark.slow
def test_the_package_alone_runs_the_demo(installed: Installed) -> None:
    said = installed.run("demo", "--steps", "1", "--methods", "iw-opd", "--jobs", "1", "--out", "demo").stdout
    assert "the student alone" in said
    assert (installed.folder / "demo" / "report.html").stat().st_size > 100_000


EXTRAS = """
import contextlib, io, json, sys
from pathlib import Path
from iwopd import cli, tiny

world = tiny.open_world(tiny.world_recipe("clean", lineage=0))
Path("prompts.parquet").write_bytes(b"PAR1")
Path("model.gguf").write_bytes(b"GGUF")
Path("prompts.jsonl").write_text('{"prompt": "1+2?"}\\n' * 8)
models = f'student = "{world.student}"\\nteacher = "{world.teacher}"'
rest = '[data]\\nsets = [{source = "prompts.jsonl"}]\\n[rollout]\\nmax_tokens = 8\\nprompts_per_step = 4'
Path("pair.toml").write_text(f"steps = 1\\n[models]\\n{models}\\n{rest}\\n")
said = {}
for key, words in json.loads(sys.argv[1]).items():
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            cli.main([word.format(student=world.student, teacher=world.teacher) for word in words])
    except SystemExit as stop:
        said[key] = [stop.code, out.getvalue()]
print(json.dumps(said))
"""
PAIR = ["train", "pair.toml"]
BOLD = [*PAIR, "--no-doctor"]
WAYS: dict[str, list[list[str]]] = {
    "data": [
        [*PAIR, "--data.sets", "[{{source='prompts.parquet'}}]"],
        ["probe", "--student", "{student}", "--teacher", "{teacher}", "--prompts", "prompts.parquet"],
    ],
    "figures": [["figures", "runs"], ["reproduce", "p1", "--figures", "figures"]],
    "gguf": [
        [*PAIR, "--models.student", "model.gguf"],
        [*BOLD, "--models.teacher", "model.gguf"],
        ["plan", "pair.toml", "--models.student", "model.gguf"],
        ["eval", "--model", "model.gguf", "--tasks", "tiny"],
        ["serve-teacher", "model.gguf"],
    ],
    "lora": [[*PAIR, "--lora.rank", "2"], [*BOLD, "--lora.rank", "2"]],
    "qlora": [[*way, "--lora.rank", "2", "--lora.quantize", "4bit"] for way in (PAIR, BOLD)],
    "torchao": [[*way, "--models.teacher_quantize", "int8"] for way in (PAIR, BOLD)],
    "tensorboard": [[*PAIR, "--tracking.trackers", "['tensorboard']"]],
    "trackio": [[*PAIR, "--tracking.trackers", "['trackio']"]],
    "wandb": [[*PAIR, "--tracking.trackers", "['wandb']"]],
    "vllm": [[*BOLD, "--rollout.engine", "vllm"], ["eval", "--model", "{student}", "--tasks", "tiny", "--engine", "vllm"]],
    "verl": [[*PAIR, "--engine", "verl"]],
}
"""What a user may type that needs an extra."""


@pytest.mark.slow
def test_every_missing_extra_is_answered_with_the_one_command_that_brings_it(
    archives: tuple[Path, Path], installed: Installed
) -> None:
    assert WAYS.keys() == PROJECT["optional-dependencies"].keys() - {"dev", "docs"}  # those are the repository's
    core = {one.name for one in wheel_requirements(archives[0])}
    for extra in WAYS:
        assert {one.name for one in wheel_requirements(archives[0], extra)} > core, extra
    asked = {f"{extra} {number}": way for extra, ways in WAYS.items() for number, way in enumerate(ways)}
    done = installed.run_python(EXTRAS, json.dumps(asked))
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers.keys() == asked.keys()
    for key, (code, text) in answers.items():
        command = f"pip install 'iwopd[{key.split()[0]}]'"
        assert code == 2, f"{key}: {text}"
        assert command in text, f"{key}: {text}"
        assert set(_commands(text)) == {command}, f"{key}: {text}"


def _commands(text: str) -> list[str]:
    return [f"pip install 'iwopd[{part.partition(']')[0]}]'" for part in text.split("pip install 'iwopd[")[1:]]

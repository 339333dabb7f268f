"""A package outside iwopd adds one of everything by entry points alone: it is installed, listed, trained and evaluated with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from waiting import PATIENCE

PACKAGE = Path(__file__).parents[1] / "example_package"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def iwopd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command with the package installed, in a folder of its own."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(PACKAGE, folder / "source")  # setuptools writes beside it
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(folder / "installed"), str(source)], check=True, capture_output=True, text=True)
    path = os.pathsep.join([str(folder / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "iwopd", *words]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if not code else done.stderr

    return run


@pytest.fixture(scope="module")
def folder(iwopd: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all parts of the package."""
    folder = tmp_path_factory.mktemp("run")
    problems = [{"id": "p", "problem": "1+2?", "answer": "3"}]
    (folder / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    task = {"name": "digits", "checker": "same-digits", "file": str(folder / "problems.jsonl"), "suffix": ""}
    (folder / "task.toml").write_text(tomli_w.dumps(task))
    recipe = {
        "models": {"world": "clean"},
        "steps": 2,
        "threads": 1,
        "method": {"objective": "log-prob-matching", "strength": 0.5, "weights": "half-life", "params": {"tokens": 30.0}},
        "rollout": {"prompts_per_step": 4, "engine": "parrot", "horizon": {"type": "part", "share": 0.25}},
        "engine": {"parrot": {"diary": str(folder / "diary.txt")}},
        "data": {"train_size": 16},
        "eval": {"prompts": 4},
        "tracking": {"console": "off", "trackers": ["notebook"]},
    }
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    iwopd("train", str(folder / "recipe.toml"), "--out", str(folder / "run"))
    return folder


def test_everything_is_listed(iwopd: Run) -> None:
    found = json.loads(iwopd("methods", "--json"))
    names = {kind: [one["name"] for one in found[kind]] for kind in ("objectives", "advantages", "rules")}
    assert names["objectives"] == ["policy-gradient", "divergence", "log-prob-matching"]
    assert "sign" in names["advantages"]
    assert "half-life" in names["rules"]
    for kind in ("objectives", "advantages", "rules"):
        for one in found[kind]:
            assert {"name", "title", "formula", "source", "params", "needs"} <= one.keys(), one
    (rule,) = (one for one in found["rules"] if one["name"] == "half-life")
    assert rule["params"] == {"tokens": 20.0}
    assert rule["needs"] == []
    assert "log-prob-matching" in iwopd("methods")
    assert [one["params"] for one in found["horizons"] if one["name"] == "part"] == [{"share": 0.5}]


def test_it_trains(folder: Path) -> None:
    first, second = (json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["objective/square"] > 0
    assert second["step"] == 2
    assert first["weights/max"] == 1.0
    assert 0 < first["rollout/length_max"] <= 20  # its horizon: a quarter of 80
    assert first["rollout/stopped"] > 0
    assert first["correction/ratio_deviation"] < 1e-3  # the engine says that its log-probs are not the trainer's
    diary = (folder / "diary.txt").read_text().split("\n")
    assert diary.count("wrote 4") >= 4  # two steps, evaluations before and after
    assert diary[-2] == "closed"
    notebook = (folder / "run" / "notebook.txt").read_text()
    assert "log-prob-matching" in notebook
    assert "objective/square" in notebook
    assert "eval/tiny" in notebook


def test_its_run_is_read_and_continued(iwopd: Run, folder: Path) -> None:
    iwopd("train", str(folder / "run"), "--resume", "--steps", "3", "--engine.parrot.diary", str(folder / "other.txt"))
    assert (folder / "other.txt").read_text().endswith("closed\n")
    iwopd("report", str(folder / "run"), "-o", str(folder / "page.html"))
    assert "log-prob-matching" in (folder / "page.html").read_text()


def test_its_checker_and_engine_evaluate(iwopd: Run, folder: Path) -> None:
    words = ["--tasks", str(folder / "task.toml"), "--no-chat", "--samples", "2", "--max-tokens", "8", "--json"]
    engine = ["--engine", "parrot", "--engine-option", f"diary={folder / 'eval.txt'}"]
    out = iwopd("eval", "--model", str(folder / "run"), *words, *engine, "--out", str(folder / "evaluation"))
    assert "digits" in out
    assert "wrote" in (folder / "eval.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout.horizon.share", "2"], "share: must be at most 1"),
        (["--rollout.horizon.type", "drift"], "horizon 'drift' has no setting 'share'"),
        (["--method.strength", "-1.0"], "strength must be positive, got -1.0"),
        (["--method.strength", "much"], "strength: must be a number"),
        (["--method.clip", "0.2"], "clip is not used by objective 'log-prob-matching': it belongs to objective"),
        (["--method.params", "{tokns = 1.0}"], "weight rule 'half-life' has no parameter 'tokns'; did you mean 'tokens'"),
        (["--engine.parrot.dairy", "x"], "engine.parrot.dairy: there is no such setting; did you mean 'diary'"),
        (["--rollout.engine", "parot"], "unknown rollout engine 'parot'; did you mean 'parrot'"),
        (["--tracking.trackers", "['notebok']"], "unknown tracker 'notebok'; did you mean 'notebook'"),
    ],
)
def test_wrong_settings_of_a_plugin_are_named(iwopd: Run, folder: Path, words: list[str], message: str) -> None:
    said = iwopd("train", str(folder / "recipe.toml"), "--out", str(folder / "refused"), *words, code=2)
    assert message in said
    assert not (folder / "refused").exists()

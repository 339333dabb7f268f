"""`iwopd train --method auto` in real processes: the advice, what is kept of it, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from iwopd.filesystem import sha256
from iwopd.runs.directory import RunDirectory
from iwopd.tiny import planned_world, world_recipe
from models import save_pair
from waiting import PATIENCE

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = save_pair(tmp_path_factory.mktemp("pair"))
    return {**settings, "steps": 2, "checkpoint": {"every": 1}}


def recipe(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(settings))
    return path


def run(*words: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "iwopd", "train", *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = RunDirectory(folder).read("metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def test_the_advice_is_taken_kept_and_resumed(pair: dict[str, Any], tmp_path: Path) -> None:
    made, folder = recipe(tmp_path, pair), tmp_path / "run"
    said = run(made, "--method", "auto", "--out", folder)
    advice = json.loads((folder / "run.json").read_text())["method_advice"]
    surely = min(advice["agreement"], advice["agreement_interval"][0]) >= advice["threshold"]
    assert advice["method"] == ("opd" if surely else "survival")
    assert advice["words"] in said
    assert advice["prompts"] == 256
    weights = {"survival": "survival", "opd": "uniform"}[advice["method"]]
    assert RunDirectory(folder).config().method.weights == weights  # the recipe says cumulative-share

    by_hand = tmp_path / "by-hand"  # the probe leaves no trace in the training
    run(recipe(tmp_path, {**pair, "method": {"weights": weights}}), "--out", by_hand)
    assert metrics(folder) == metrics(by_hand)

    made = recipe(tmp_path, {**pair, "steps": 3})
    for words in ([made, "--out", folder, "--resume", "--method", "auto"], [folder, "--resume", "--steps", "4"]):
        assert "probing" not in run(*words)
        assert json.loads((folder / "run.json").read_text())["method_advice"] == advice
    assert len(metrics(folder)) == 4
    assert RunDirectory(folder).config().method.weights == weights

    assert "holds a run already" in run(made, "--out", folder, "--method", "auto", code=2)
    assert "was not started with --method auto" in run(made, "--out", by_hand, "--resume", "--method", "auto", code=2)


def test_whole_distributions_stay_whole(pair: dict[str, Any], tmp_path: Path) -> None:
    run(
        recipe(tmp_path, {**pair, "steps": 1, "method": {"objective": "divergence"}}),
        "--method",
        "auto",
        "--out",
        tmp_path / "run",
    )
    advice = json.loads((tmp_path / "run" / "run.json").read_text())["method_advice"]
    assert advice["method"] in ("kl", "kl-survival")
    assert RunDirectory(tmp_path / "run").config().method.objective == "divergence"


@pytest.mark.slow
def test_on_the_embedded_world(tmp_path: Path) -> None:
    settings = {"steps": 2, "threads": 1, "models": {"world": "clean"}, "eval": {"every": 2, "prompts": 20}}
    rollout = {"prompts_per_step": 8}
    said = run(recipe(tmp_path, {**settings, "rollout": rollout}), "--method", "auto", "--out", tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    advice = about["method_advice"]
    world = planned_world(world_recipe("clean"))
    files = [folder / "model.safetensors" for folder in (world.student, world.teacher)]
    assert about["models"] == {name: sha256(file)[:12] for name, file in zip(("student", "teacher"), files, strict=True)}
    assert f"agreement of gradients {advice['agreement']:+.2f}" in said
    assert len(metrics(tmp_path / "run")) == 2

"""`iwopd plan` as it is typed: on the paper's recipes without a network, and on inputs that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tomli_w

from iwopd.cli import main
from models import save_pair

RECIPES = Path(__file__).parents[2] / "src" / "iwopd" / "recipes" / "paper"
LARGE = RECIPES / "qwen3-30b-a3b-from-qwen3-235b-a22b-instruct-2507-iw-opd-math.toml"
SMALL = RECIPES / "qwen3-0.6b-from-qwen3-4b-instruct-2507-iw-opd-math.toml"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, arguments)])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_the_papers_recipes_on_the_papers_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in (LARGE, SMALL):
        code, said, _ = plan(capsys, recipe, "--gpu", "h100", "--nodes", 4)
        assert code == 0, said
        for word in ("An estimate", "rollout", "teacher", "old log-probs", "update", "weight sync", "GPU-hours"):
            assert word in said
        assert "Will it fit?" in said
        assert "What is the bottleneck?" in said


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = plan(capsys, SMALL, "--nodes", 2, "--price", 2, "--response-tokens", 3000, "--json", "--steps", 10)
    shown = json.loads(said)
    assert code == 0
    assert shown["steps"] == 10
    assert shown["step"]["mean_response_tokens"] == 3000
    assert shown["step"]["seconds"]["low"] < shown["step"]["seconds"]["typical"] < shown["step"]["seconds"]["high"]
    assert shown["cost"]["high"] == pytest.approx(2 * shown["gpu_hours"]["high"])
    assert {stage: times["typical"] > 0 for stage, times in shown["step"]["stages"].items()}["rollout"]
    assert shown["split"]["student_gpus"] + shown["split"]["teacher_gpus"] == 16


def test_folders_without_weights_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = save_pair(tmp_path)
    for name in ("student", "teacher"):
        (tmp_path / name / "model.safetensors").unlink()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(settings))
    code, said, _ = plan(capsys, recipe, "--gpus-per-node", 1, "--gpu", "rtx4090")
    assert code == 0, said
    assert "its config.json" in said
    assert "this package's trainer on one GPU" in said


def test_a_gpu_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = plan(capsys, SMALL, "--gpu", "h1000")
    assert code == 2
    assert error == (
        "iwopd: --gpu h1000: there is no such GPU in the table; did you mean 'h100'? "
        "Known: a100-40, a100-80, h100, h200, b200, l40s, rtx4090\n"
    )


@pytest.mark.parametrize("option", ["--nodes", "--gpus-per-node"])
def test_no_machines(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = plan(capsys, SMALL, option, 0)
    assert (code, error) == (2, f"iwopd: {option} is 0: it must be at least 1\n")


def test_a_recipe_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(SMALL, tmp_path / "mine.toml")
    code, _, error = plan(capsys, tmp_path / "mime.toml")
    assert code == 2
    assert f"no recipe at {tmp_path / 'mime.toml'}; did you mean {tmp_path / 'mine.toml'}?" in error


@pytest.mark.parametrize("name", ["Nobody/no-such-model-here", "./no/such/folder"])
def test_a_model_that_cannot_be_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = plan(capsys, SMALL, "--models.teacher", name)
    assert code == 2
    assert f"models.teacher = {name}: its shape cannot be read" in error
    assert "Name a local folder that holds its config.json" in error


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, error = plan(capsys, LARGE, "--gpu", "l40s", "--nodes", 2)
    assert (code, error) == (1, "")
    assert "Will it fit? No. student, update: " in said
    assert "To change it: use more GPUs for the student" in said
    assert "By this estimate it fits with --gpu" in said
    code, said, _ = plan(capsys, SMALL, "--gpu", "rtx4090", "--gpus-per-node", 1, "--models.student", "Qwen/Qwen3-4B")
    assert code == 1
    assert "train an adapter (--lora.rank 16" in said


def test_a_price_is_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = plan(capsys, SMALL, "--price", "-1")
    assert (code, error) == (2, "iwopd: --price is -1: it must be a price, 0 or more\n")

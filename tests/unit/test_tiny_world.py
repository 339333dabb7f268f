"""Cache and prompts of the embedded world, with models of a few steps. Starting a worker takes seconds: few tests do."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from iwopd.tiny import cache, task
from iwopd.tiny.__main__ import main as train_to_folder
from iwopd.tiny.architecture import ModelRecipe, ModelSize, Stage
from iwopd.tiny.pretrain import PretrainingListener, pretrain
from iwopd.tiny.world import World, WorldRecipe, open_world
from waiting import PATIENCE


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the real user cache."""
    monkeypatch.setenv("IWOPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train here instead of in worker processes: the same code on the same folders, without their start-up time."""

    def train(recipes: Mapping[str, ModelRecipe], drafts: Mapping[str, Path], _: PretrainingListener | None) -> None:
        for label, recipe in recipes.items():
            train_to_folder(drafts[label], recipe)

    monkeypatch.setattr(cache, "_train", train)


def micro(name: str = "micro", steps: int = 4) -> WorldRecipe:
    stage = Stage(steps, 3, right=1.0, batch=2)
    size = ModelSize(16, 1)
    return WorldRecipe(name, 6, ModelRecipe(f"{name}-teacher", size, (stage,)), ModelRecipe(f"{name}-student", size, (stage,)))


def unbuilt(operands: int = 6) -> World:
    """A world of which only the prompts are wanted."""
    recipe = micro()
    return World(WorldRecipe("w", operands, recipe.teacher, recipe.student), Path("nowhere"), Path("nowhere"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def stamp(folder: Path) -> tuple[int, int]:
    status = (folder / "model.safetensors").stat()
    return status.st_ino, status.st_mtime_ns


def test_a_world_is_built_once_reported_on_and_then_found(own_cache: Path) -> None:
    heard: list[tuple[str, int, int, float]] = []
    world = open_world(micro(steps=12), progress=lambda *news: heard.append(news))
    assert sorted(news[:3] for news in heard) == [(role, step, 12) for role in ("student", "teacher") for step in (10, 12)]
    assert all(0 < loss < 20 for *_, loss in heard)
    assert world.teacher.parent == world.student.parent == own_cache / "tiny"
    assert weights(world.teacher) != weights(world.student)
    before = stamp(world.teacher), stamp(world.student)
    heard.clear()
    assert open_world(micro(steps=12), progress=lambda *news: heard.append(news)) == world
    assert not heard
    assert (stamp(world.teacher), stamp(world.student)) == before
    assert not list((own_cache / "tiny").glob(".*")), "temporary folders were left behind"
    # What the workers trained is what `pretrain` trains here with one thread, and loads like any other model.
    model = AutoModelForCausalLM.from_pretrained(world.student)
    tokenizer = AutoTokenizer.from_pretrained(world.student)
    assert tokenizer.get_vocab() == world.tokenizer.get_vocab()
    assert (model.config.model_type, model.dtype) == ("qwen3", torch.float32)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = pretrain(micro(steps=12).student).state_dict()
    finally:
        torch.set_num_threads(threads)
    for name, values in model.state_dict().items():
        assert torch.equal(values, here[name]), name


@pytest.mark.usefixtures("no_workers")
def test_refresh_trains_again_and_gives_the_same_weights() -> None:
    world = open_world(micro())
    before, old = stamp(world.student), weights(world.student)
    assert open_world(micro(), refresh=True) == world
    assert stamp(world.student) != before
    assert weights(world.student) == old


def flip_a_bit(folder: Path) -> None:
    data = bytearray(weights(folder))
    data[-5] ^= 1
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flip_a_bit, "model.safetensors has changed"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "entry.json").write_text('{"fil'), "entry.json cannot be used"),
        (lambda folder: (folder / "entry.json").write_text("[]"), "entry.json cannot be used"),
        (lambda folder: (folder / "entry.json").write_text('{"files": {}}'), "does not list config.json"),
        (lambda folder: (folder / "entry.json").unlink(), "entry.json is missing"),
    ],
    ids=["bit", "lost file", "cut entry", "foreign entry", "empty entry", "no entry"],
)
def test_damage_is_found_told_and_repaired(harm: object, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(harm)
    world = open_world(micro())
    whole, teacher = weights(world.student), stamp(world.teacher)
    harm(world.student)
    with caplog.at_level(logging.WARNING):
        assert open_world(micro()) == world
    assert [reason in message and world.student.name in message for message in caplog.messages] == [True]
    assert weights(world.student) == whole
    assert cache.damage(world.student) is None
    assert stamp(world.teacher) == teacher, "the undamaged model was trained again"


@pytest.mark.usefixtures("no_workers")
def test_the_entry_tells_how_the_model_was_made() -> None:
    recipe = micro()
    entry = json.loads((open_world(recipe).teacher / "entry.json").read_text())
    assert ModelRecipe.from_dict(entry["recipe"]) == recipe.teacher


def test_two_processes_at_once_train_once(own_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "build.py"
    script.write_text(
        textwrap.dedent("""
        from pathlib import Path
        from iwopd.tiny import ModelRecipe, ModelSize, Stage, WorldRecipe, open_world
        stage = Stage(30, 3, right=1.0, batch=2)
        models = [ModelRecipe(role, ModelSize(16, 1), (stage,)) for role in ("teacher", "student")]
        heard = []
        world = open_world(WorldRecipe("w", 6, *models), progress=lambda *news: heard.append(news))
        print(len(heard), world.teacher, (world.teacher / "model.safetensors").stat().st_ino)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    started = [
        subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    results, told = [], 0
    for process in started:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        results.append(out.split(maxsplit=1))
        told += "another process is training" in err
    assert sorted(int(heard) for heard, _ in results) == [0, 6], "both trained, or none"
    assert results[0][1] == results[1][1]
    assert told == 1, "the one that waits says so"
    assert not list((own_cache / "tiny").glob(".*"))


@pytest.mark.usefixtures("no_workers")
def test_leftovers_of_a_killed_build_are_cleared(own_cache: Path) -> None:
    recipe = micro()
    leftover = own_cache / "tiny" / f".{recipe.teacher.key}.killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x")
    open_world(recipe)
    assert not leftover.exists()


def test_a_failing_build_says_why_and_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"training of the (teacher|student) stopped with exit code 1"):
        open_world(micro())
    assert [p.name for p in (own_cache / "tiny").iterdir() if not p.name.endswith(".lock")] == []


def test_a_progress_callback_that_raises_stops_the_training(own_cache: Path) -> None:
    """Ctrl-C arrives this way too: no process is left training, nothing half-made is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_world(micro(steps=2000), progress=stop)
    assert [p.name for p in (own_cache / "tiny").iterdir() if not p.name.endswith(".lock")] == []


def test_the_cache_lies_in_the_user_cache_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("IWOPD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir().name == "iwopd"
    assert tmp_path in cache.cache_dir().parents


@pytest.mark.parametrize("operands", [6, 8])
def test_prompts_are_rendered_answered_unique_and_apart_from_evaluation(operands: int) -> None:
    world = unbuilt(operands)
    train = [p for seed in range(3) for p in world.prompts(400, seed=seed)]
    evaluation = world.eval_prompts(400)
    for prompt in [*train[:50], *evaluation[:50]]:
        assert len(prompt.token_ids) == 2 * operands
        assert prompt.text.endswith("?")
        assert world.tokenizer.decode(list(prompt.token_ids)) == prompt.text
        assert prompt.answer == str(eval(prompt.text[:-1]) % 10)
        assert world.check(prompt, f"\\boxed{{{prompt.answer}}}")
        assert not world.check(prompt, f"\\boxed{{{(int(prompt.answer) + 1) % 10}}}")
    assert len({p.id for p in evaluation}) == 400
    assert not {p.text for p in train} & {p.text for p in evaluation}


def test_prompts_are_stable_and_shorter_lists_begin_longer_ones() -> None:
    world = unbuilt()
    assert world.prompts(20, seed=5) == world.prompts(60, seed=5)[:20]
    assert world.prompts(20, seed=5) != world.prompts(20, seed=6)
    assert world.eval_prompts(20) == world.eval_prompts(60)[:20]
    assert world.eval_prompts(2)[0].id == "eval/" + world.eval_prompts(2)[0].text[:-1]


def test_a_solution_fits_the_response_budget() -> None:
    world = unbuilt(8)
    solution = task.right_solution(world.eval_prompts(1)[0].text[:-1])
    assert len(world.tokenizer.encode(solution)) + 1 <= world.max_response_tokens

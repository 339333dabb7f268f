"""Sharded training in real gloo processes: the update of one, a part of its memory, checkpoints for any number of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from iwopd.config import ConfigError, make_config
from iwopd.lm import ResponseModel
from iwopd.runs.directory import RunDirectory
from iwopd.train.sharding import ShardedWeights, ShardingError
from models import make_model, save_pair
from shard_ranks import CASES, COPIED, WORLDS
from waiting import PATIENCE

TESTS = Path(__file__).resolve().parents[1]
SEVERAL = [world for world in WORLDS if world > 1]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that `shard_ranks` does, once for all tests."""
    folder = tmp_path_factory.mktemp("sharding")
    settings = save_pair(folder)
    settings |= {"checkpoint": {"every": 1, "keep": 9}, "tracking": {"console": "off"}, "optim": {"lr": 1e-3, "shard": True}}
    (folder / "run.json").write_text(json.dumps(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, str(TESTS / "shard_ranks.py"), str(folder)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("turn*.log")))
    assert ended.returncode == 0, ended.stderr[-3000:] + logs
    return folder


@cache
def tensors_of(folder: Path, name: str, world: int) -> dict[str, Tensor]:
    return load_file(folder / f"{name}-{world}.safetensors")


@cache
def seen_by(folder: Path, name: str, world: int) -> list[dict[str, Any]]:
    """By process."""
    found: list[dict[str, Any]] = json.loads((folder / f"{name}-{world}.json").read_text())
    return found


def distance(one: dict[str, Tensor], other: dict[str, Tensor], first: str, second: str = "") -> float:
    """Between the tensors of two prefixes, as one vector."""
    names = [name.removeprefix(first) for name in one if name.startswith(first)]
    parts = [one[first + name].double() - other[(second or first) + name].double() for name in names]
    return float(torch.cat([part.flatten() for part in parts]).norm())


@pytest.mark.slow
@pytest.mark.parametrize("world", SEVERAL)
@pytest.mark.parametrize("name", CASES)
def test_the_update_is_that_of_one_process(done: Path, name: str, world: int) -> None:
    one, several = tensors_of(done, name, 1), tensors_of(done, name, world)
    assert one.keys() == several.keys()
    moved = distance(one, one, "0/", "2/")
    assert moved > 0.1
    for step in ("1/", "2/"):
        assert distance(one, several, step) / moved < 1e-5  # 2e-6 and less were seen
    masters = (
        distance(one, several, "optimizer/masters.") if CASES[name].dtype == torch.bfloat16 and not CASES[name].lora else 0.0
    )
    assert masters / moved < 1e-5
    assert distance(one, several, "average/") / moved < 1e-5
    for mine, theirs in zip(seen_by(done, name, 1)[0]["steps"], seen_by(done, name, world)[0]["steps"], strict=True):
        if not mine["skipped"]:  # a broken micro-batch has no statistics, and the others are not the same
            assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world", SEVERAL)
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].optim.get("shard", True)])
def test_every_process_holds_its_part(done: Path, name: str, world: int) -> None:
    whole = seen_by(done, name, 1)[0]["bytes"]
    each = [seen["bytes"] for seen in seen_by(done, name, world)]
    for kind in ("weights", "gradients", "moments", "frozen"):
        assert sum(held[kind] for held in each) == whole[kind]
        uneven = 1.4 if CASES[name].lora else 1.1  # adapters have few rows
        assert max(held[kind] for held in each) <= uneven * whole[kind] / world
    assert [held["student"] for held in each] == [0] * world  # its memory is given back during the update


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS[:3])
def test_log_probs_that_are_not_numbers_end_no_process_and_no_training(done: Path, world: int) -> None:
    tensors = tensors_of(done, "not finite", world)
    assert distance(tensors, tensors, "0/", "1/") == 0.0
    assert distance(tensors, tensors, "1/", "2/") > 0.1
    for process in seen_by(done, "not finite", world):
        first, second = process["steps"]
        assert first["loss"] != first["loss"]
        assert (first["skipped"], second["skipped"]) == (1, 0)


@pytest.mark.slow
def test_a_model_with_its_own_logits_was_among_them(done: Path) -> None:
    assert [seen_by(done, name, 2)[0]["fused"] for name in ("soft cap", "divergence")] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(1, len(WORLDS)))
@pytest.mark.parametrize("name", COPIED)
def test_checkpoints_load_into_any_number_of_processes(done: Path, name: str, turn: int) -> None:
    """Bit for bit: what was read from other processes and written again is the same file."""
    first, again = (done / f"copies-{number}" / name / "step-000001" for number in (turn - 1, turn))
    for file in ("model/model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (first / file).read_bytes() == (again / file).read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_processes(done: Path) -> None:
    """The same prompts, rollouts and losses as in one process all the time."""
    run, alone = (list(RunDirectory(done / name).read("metrics.jsonl")) for name in ("run", "alone"))
    assert [record["step"] for record in run] == list(range(1, len(WORLDS) + 1))
    for mine, theirs in zip(run, alone, strict=True):
        for name in ("tokens", "loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3)
    for step in range(1, len(WORLDS) + 1):
        state = load_file(done / "run" / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors")
        assert {int(value) for name, value in state.items() if name.endswith(".step")} == {step}


def test_what_cannot_be_sharded_is_refused_with_words() -> None:
    several: Any = SimpleNamespace(rank=0, count=2)
    lm = ResponseModel(make_model("qwen3"))
    lm.fused = lm.chunked = False
    with pytest.raises(ShardingError, match=r"computed one rollout at a time.*leave optim\.shard out"):
        ShardedWeights(lm, several)
    mixed = ResponseModel(make_model("qwen3"))
    mixed.model.model.norm.bfloat16()
    with pytest.raises(
        ShardingError, match=r"several precisions \(torch\.bfloat16, torch\.float32\).*models\.dtype = 'float32'"
    ):
        ShardedWeights(mixed, several)
    strange = ResponseModel(make_model("qwen3"))
    strange.model._no_split_modules = []
    with pytest.raises(ShardingError, match=r"which layers a Qwen3ForCausalLM has is unknown"):
        ShardedWeights(strange, several)
    quantised = {"lora": {"rank": 4, "quantize": "4bit"}, "optim": {"shard": True}}
    with pytest.raises(ConfigError, match=r"optim\.shard cannot spread quantised weights"):
        make_config({"models": {"student": "a", "teacher": "b"}, "data": {"prompts": "p"}, **quantised})

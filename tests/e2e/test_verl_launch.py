"""`iwopd train --engine verl` at the command line: the command it would run, and what it refuses. No Ray is started here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "src" / "iwopd" / "recipes" / "paper" / "qwen3-1.7b-from-qwen3-30b-a3b-instruct-2507-iw-opd-math.toml"
TINY = ROOT / "src" / "iwopd" / "recipes" / "tiny" / "iw-opd.toml"

BARE = """
import socket, sys

def refuse(*_):
    raise OSError("no network here")

socket.socket.connect = refuse
for name in ("verl", "ray", "hydra", "omegaconf", "transfer_queue", "pyarrow", "vllm", "sglang"):
    sys.modules[name] = None  # importing it fails
from iwopd.cli import main
"""
"""A machine without network, verl and Ray."""
ONE = "main(sys.argv[1:])"
MANY = """
import json

for text in sys.argv[2:]:
    try:
        main(["train", *json.loads(text)])
    except SystemExit as left:
        print(f"EXIT {left.code}", file=sys.stderr)
"""


def _iwopd(folder: Path, *arguments: str, bare: bool = True, many: bool = False) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "IWOPD_VERL_CPU", "IWOPD_DATA")}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "IWOPD_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub")}
    program = ["-c", BARE + (MANY if many else ONE)] if bare else ["-m", "iwopd"]
    command = [sys.executable, *program, "train", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_dry_run_of_the_papers_recipe(tmp_path: Path) -> None:
    """Offline, without models, verl or Ray; nothing is written; the command is one that a shell understands."""
    done = _iwopd(
        tmp_path, str(PAPER), "--engine", "verl", "--nodes", "4", "--cluster.teacher-tensor-parallel", "2", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    words = shlex.split(done.stdout.replace("\\\n", " "))
    start = words.index("python")
    run = tmp_path / "runs" / f"{PAPER.stem}-seed0"
    assert words[start + 1 : start + 3] == ["-m", "iwopd.cluster.verl.main"]
    assert dict(word.split("=", 1) for word in words[:start]) == {
        "RAY_ADDRESS": "auto",
        "VERL_FILE_LOGGER_PATH": str(run / "verl" / "metrics-001.jsonl"),
    }
    values = dict(word.lstrip("+").split("=", 1) for word in words[start + 3 :])
    wanted = {
        "trainer.nnodes": "2",
        "trainer.n_gpus_per_node": "8",
        "distillation.nnodes": "2",
        "distillation.teacher_models.teacher_model.model_path": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size": "2",
        "distillation.teacher_models.teacher_model.inference.max_model_len": "18433",
        "actor_rollout_ref.model.path": "Qwen/Qwen3-1.7B",
        "distillation.distillation_loss.loss_mode": "iw_opd",
        "distillation.distillation_loss.iwopd.params.gamma": "0.5",
        "data.train_batch_size": "1024",
        "trainer.default_local_dir": str(run / "verl" / "checkpoints"),
        "trainer.resume_mode": "disable",
    }
    assert {name: values[name] for name in wanted} == wanted


def test_dry_run_of_an_embedded_world_on_a_running_cluster(tmp_path: Path) -> None:
    arguments = ["--engine", "verl", "--gpus-per-node", "2", "--ray-address", "10.0.0.1:6379", "--dry-run"]
    done = _iwopd(tmp_path, str(TINY), *arguments, "--out", "somewhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("RAY_ADDRESS=10.0.0.1:6379 ")
    assert f"actor_rollout_ref.model.path={tmp_path / 'cache' / 'tiny' / 'clean-student'}" in done.stdout
    assert list(tmp_path.iterdir()) == []


REFUSED: list[tuple[list[str], str]] = [
    (["--engine", "verl", "--gpus-per-node", "2"], "needs verl, which is not installed: pip install 'iwopd[verl]'"),
    (["--engine", "verl", "--gpus-per-node", "1", "--dry-run"], "student and teacher need one each"),
    (["--engine", "verl", "--dry-run", "--rollout.temperature", "0.7"], "rollout.temperature is 0.7: verl's teacher scores"),
    (["--engine", "verl", "--dry-run", "--lora.rank", "8", "--lora.alpha", "1.5"], "lora.alpha is 1.5"),
    (["--engine", "verl", "--dry-run", "--gpus-per-node", "7", "--cluster.teacher-gpus", "2"], "64 rollouts"),
    (["--engine", "verl", "--dry-run", "--ray-address", "http://head:8265"], "ray job submit --address http://head:8265"),
    (["--engine", "verl", "--dry-run", "--cluster.overrides", "['trainer.resume_mode=auto']"], "which the recipe decides"),
    (["--engine", "verl", "--dry-run", "--method.advantage", "baseline"], "needs kl, and verl's distillation knows only"),
    (["--dry-run"], "--dry-run goes with --engine verl"),
    (["--nodes", "2"], "--nodes goes with --engine verl"),
    (["--engine", "verl", "--dry-run", "--cluster.teacher_gpu", "2"], "did you mean 'cluster.teacher_gpus'?"),
]


def test_what_is_refused(tmp_path: Path) -> None:
    """One clear line and exit code 2 for each, one after the other in one process, which takes long to start."""
    done = _iwopd(tmp_path, *(json.dumps([str(TINY), *arguments]) for arguments, _ in REFUSED), many=True)
    answers = done.stderr.split("EXIT ")
    assert done.returncode == 0, done.stderr
    assert len(answers) == len(REFUSED) + 1
    for (arguments, words), text, after in zip(REFUSED, answers, answers[1:], strict=False):
        said = text.partition("\n")[2] if text is not answers[0] else text
        assert said.startswith("iwopd: "), arguments
        assert words in said, arguments
        assert "Traceback" not in said
        assert after.startswith("2\n"), arguments
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_machine_with_fewer_gpus_than_asked_for(tmp_path: Path) -> None:
    """Verl and Ray are there, the GPUs are not: nothing is made, nothing started."""
    done = _iwopd(tmp_path, str(TINY), "--engine", "verl", "--gpus-per-node", "64", bare=False)
    assert done.returncode == 2, done.stderr
    assert "1 x 64 GPUs, and this machine has" in done.stderr
    assert not (tmp_path / "runs").exists()

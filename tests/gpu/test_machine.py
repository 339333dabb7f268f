"""Processes on the device: training against the CPU, ranks that talk, vLLM, and the whole checklist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.config import make_config
from iwopd.train.doctor.gpu import ranks
from iwopd.train.doctor.gpu.checklist import Subject, run_isolated
from iwopd.train.doctor.gpu.isolation import run_alone
from iwopd.train.doctor.gpu.steps import BFLOAT16, FLOAT32, Tolerance, distance, save_tiny, train

VARIANTS: dict[str, tuple[dict[str, Any], Tolerance]] = {
    "plain": ({}, FLOAT32),
    "small micro-batches": ({"optim": {"lr": 1e-3, "token_budget": 200, "gradient_checkpointing": True}}, FLOAT32),
    "two updates": ({"optim": {"lr": 1e-3, "mini_batches": 2}}, FLOAT32),
    "divergence": ({"method": {"objective": "divergence", "weights": "survival"}}, FLOAT32),
    "exopd": ({"method": {"advantage": "exopd", "weights": "cumulative-share"}}, FLOAT32),
    "bfloat16": ({"precision": "bf16"}, BFLOAT16),
    "bfloat16 teacher": ({"models": {"teacher_dtype": "bfloat16"}}, BFLOAT16),
}
"""Settings beside those of the checklist's three steps, and how far the GPU may be from the CPU with float32 scores."""


def settings_of(variant: str, folder: Path) -> dict[str, Any]:
    settings, changes = save_tiny(folder), VARIANTS[variant][0]
    for name, value in changes.items():
        settings[name] = {**settings[name], **value} if name == "models" else value
    return settings


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_valid_recipe(variant: str, tmp_path: Path) -> None:
    make_config(settings_of(variant, tmp_path))


def compare(variant: str, device: str, count: int, folder: Path) -> None:
    """Three steps by one process on the CPU, and by some on the device."""
    settings = settings_of(variant, folder)
    for name, where, processes in (("cpu", "cpu", 1), ("device", device, count)):
        ended = train(settings, folder / name, where, ranks=processes)
        assert [one.code for one in ended] == [0] * processes, "\n".join(one.words for one in ended)
    found = distance(folder / "cpu", folder / "device", folder / "student")
    assert found.within(VARIANTS[variant][1]), found


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_three_steps_are_the_cpus(variant: str, device: torch.device, tmp_path: Path) -> None:
    """On a CPU the checklist's own test does it, for one of them."""
    compare(variant, str(device), 1, tmp_path)


@pytest.mark.slow
def test_two_processes_train_as_one(two_of_them: str, tmp_path: Path) -> None:
    compare("plain", two_of_them, 2, tmp_path)


def test_ranks_talk(two_of_them: str, tmp_path: Path) -> None:
    (found,) = ranks.check_ranks(two_of_them, 2, tmp_path)
    assert found.level == "pass", found.text()
    assert ("nccl" if two_of_them.startswith("cuda") else "gloo") in found.message


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_vllm_starts_and_follows_the_student(device: torch.device, tmp_path: Path) -> None:
    """On a CPU: tests/vllm/test_doctor.py."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: pip install 'iwopd[vllm]' (docs/vllm.md)")
    found = list(run_isolated("vllm", Subject(str(device), None, ()), tmp_path, 900))
    assert [finding.level for finding in found] == ["pass"] * 3, [finding.text() for finding in found]


@pytest.mark.slow
def test_the_checklist_says_ready(device: torch.device, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "iwopd", "doctor", "--gpu", "--device", str(device)]
    # Without it oneDNN picks AMX kernels on some virtual machines that do not have them, and bfloat16 kills a process.
    ended = run_alone(command, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, seconds=3600, folder=tmp_path)
    lines = ended.output.strip().splitlines()
    assert (ended.code, lines[-1]) == (0, "ready"), ended.output
    checked = {line[6:20].strip() for line in lines if line[:4] in ("pass", "warn")}
    everything = {"versions", "device", "products", "attention", "optimizer", "sampling", "flash", "ranks", "vllm", "steps"}
    assert everything <= checked, ended.output
    assert "...   steps" in ended.output  # it says what it is at

"""The GPU's checklist: every check on the CPU for real, and what it says of devices that are not here."""

from __future__ import annotations

import importlib.util
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
from torch.nn.attention import SDPBackend

from iwopd.cli import main
from iwopd.config import make_config
from iwopd.rollout import sampling
from iwopd.rollout.engine import Engine
from iwopd.rollout.local import LocalEngine
from iwopd.section import Section
from iwopd.tiny.architecture import ModelSize, new_model
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.doctor.gpu import checklist, devices, engine, flash, kernels, steps, verdict
from iwopd.train.doctor.gpu.checklist import Check, Subject, examine_gpu, run_isolated
from iwopd.train.doctor.gpu.devices import choose_device, describe, variables
from iwopd.train.doctor.gpu.isolation import Ended
from iwopd.train.doctor.gpu.steps import BFLOAT16, FLOAT32, Distance, judged, save_tiny

CPU = torch.device("cpu")


def levels(found: Iterator[Finding]) -> list[str]:
    return [finding.level for finding in found]


# --- which device ----------------------------------------------------------------------------------------------------


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str | None) -> None:
    """The program `nvidia-smi` as it would answer, or none."""
    monkeypatch.setenv("PATH", str(folder))
    if says is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)


def build(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, gpus: int = 0) -> None:
    """A torch of another build: there is only one here."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "message", "remedy"),
    [
        ("2.13.0+cpu", None, None, "torch 2.13.0+cpu is a CPU build", "pip install --force-reinstall"),
        ("2.13.0+cpu", None, "NVIDIA A100, 550.54", "an NVIDIA driver is here (NVIDIA A100, 550.54)", "torch==2.13.0"),
        ("2.13.0", "12.8", None, "no driver answers here", "--gpus all"),
        ("2.13.0", "12.8", "NVIDIA V100, 440.33", "finds no usable GPU", "too old for CUDA 12.8"),
    ],
)
def test_a_machine_without_a_gpu_is_told_what_to_do(
    version: str, cuda: str | None, driver: str | None, message: str, remedy: str, tmp_path: Path, monkeypatch: Any
) -> None:
    build(monkeypatch, version, cuda)
    nvidia_smi(tmp_path, monkeypatch, driver)
    found = choose_device(None)
    assert isinstance(found, Finding)
    assert found.level == "fail"
    assert message in found.message
    assert remedy in found.remedy


def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, "2.13.0", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = choose_device(None)
    assert isinstance(found, Finding)
    assert "CUDA_VISIBLE_DEVICES is ''" in found.message


def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, "2.13.0", "12.8", gpus=2)
    assert [choose_device(name) for name in (None, "cuda", "cuda:1", "cpu")] == ["cuda:0", "cuda:0", "cuda:1", "cpu"]
    beyond, other = choose_device("cuda:2"), choose_device("mps")
    assert isinstance(beyond, Finding)
    assert "cuda:0 to cuda:1" in beyond.remedy
    assert isinstance(other, Finding)
    assert "no device of this checklist" in other.message


def test_a_process_sees_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert variables("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-77")
    assert variables("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-77"}
    assert variables("cpu") == {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


@pytest.mark.parametrize(
    ("capability", "free", "expected"),
    [
        ((8, 0), 79, ["pass", "pass"]),
        ((9, 0), 79, ["pass", "pass"]),
        ((7, 0), 79, ["pass", "warn"]),
        ((6, 1), 79, ["pass", "fail"]),
        ((12, 0), 79, ["pass", "pass"]),  # by the newest PTX
        ((8, 6), 30, ["pass", "pass", "warn"]),
    ],
)
def test_a_gpu_is_described(capability: tuple[int, int], free: int, expected: list[str], monkeypatch: Any) -> None:
    """With torch's answers made up: there is no GPU here."""
    build(monkeypatch, "2.13.0", "12.8", gpus=1)
    about = SimpleNamespace(name="NVIDIA Test", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80", "sm_90", "sm_90a", "compute_90"])
    monkeypatch.setattr(devices, "free_bytes", lambda _: free * 10**9)
    monkeypatch.setattr(devices, "total_bytes", lambda _: 80 * 10**9)
    monkeypatch.setattr(devices, "_driver", lambda: "NVIDIA Test, 580.1")
    found = list(describe(torch.device("cuda")))
    assert [finding.level for finding in found] == expected, [finding.text() for finding in found]
    assert "80.0 GB free" in found[1].message
    assert "CUDA 12.8; driver: NVIDIA Test, 580.1" in found[1].message


def test_the_cpu_is_described() -> None:
    versions, device = describe(CPU)
    assert f"torch {torch.__version__}" in versions.message
    assert "cores" in device.message


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [kernels.check_products, kernels.check_attention, kernels.check_optimizer])
def test_the_cpus_kernels_are_right(check: Callable[[torch.device], Iterator[Finding]]) -> None:
    found = list(check(CPU))
    assert found
    assert {finding.level for finding in found} == {"pass"}, [finding.text() for finding in found]


def test_a_product_that_is_computed_as_tf32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of TF32, made up: a CPU has none."""
    errors = iter([1e-3, 1.0])
    monkeypatch.setattr(kernels, "relative_error", lambda *_: next(errors))
    float32, bfloat16 = kernels.check_products(CPU)
    assert (float32.level, bfloat16.level) == ("fail", "fail")
    assert "computed as TF32" in float32.message
    assert "NVIDIA_TF32_OVERRIDE" in float32.remedy


def test_attention_with_wrong_numbers_and_without_frugal_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels are broken; there is none here."""
    answers = {SDPBackend.MATH: 0.0, SDPBackend.FLASH_ATTENTION: 1.0}
    monkeypatch.setattr(kernels, "_attention_error", lambda device, dtype, backend: answers.get(backend))
    found = list(kernels.check_attention(torch.device("cuda")))
    assert [finding.level for finding in found] == ["fail", "warn"] * 2
    assert "wrong numbers from flash" in found[0].message
    assert "only math works" in found[1].message


def test_a_fused_optimizer_that_does_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.optim.AdamW

    def other(parameters: Any, *, lr: float, fused: bool, **more: Any) -> Any:
        return plain(parameters, lr=lr * (1.01 if fused else 1), fused=fused, **more)

    monkeypatch.setattr(torch.optim, "AdamW", other)
    assert levels(kernels.check_optimizer(CPU)) == ["fail"]


def test_draws_are_compared_with_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "VOCABULARY", 2000)
    assert levels(kernels.check_sampling(CPU)) == ["pass"] * 3
    calls = iter(range(100))
    right = sampling.choose

    def off_by_one(logits: Any, noise: Any, settings: Any) -> Any:
        chosen = right(logits, noise, settings)
        return chosen._replace(ids=chosen.ids + 1) if next(calls) % 2 else chosen

    monkeypatch.setattr(kernels, "choose", off_by_one)
    assert levels(kernels.check_sampling(CPU)) == ["fail"] * 3


def test_packed_scores_in_bfloat16_are_near_the_float32_ones() -> None:
    """The body of the FlashAttention check, with torch's attention."""
    scored = flash.score_through(CPU, "sdpa")
    assert scored.obstacle is None
    assert 1e-6 < scored.difference < 0.02
    assert levels(flash.check_flash(CPU)) == ["pass"]


def test_flash_attention_that_is_missing_or_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that pretends to be a GPU: FlashAttention runs on nothing else."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (missing,) = flash.check_flash(gpu)
    assert (missing.level, "sdpa" in missing.message) == ("warn", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(flash, "_float32", lambda _: "it refuses float32")
    for scored, level in (
        (flash.Scored(0.01, None), "pass"),
        (flash.Scored(0.01, "no reason"), "warn"),
        (flash.Scored(0.5, None), "fail"),
    ):
        monkeypatch.setattr(flash, "score_through", lambda *_, scored=scored: scored)
        assert levels(flash.check_flash(gpu)) == [level]

    def broken(*_: Any) -> Any:
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(flash, "score_through", broken)
    (finding,) = flash.check_flash(gpu)
    assert "undefined symbol" in finding.message


# --- an engine that follows the student ------------------------------------------------------------------------------


def test_an_engine_with_the_students_weights_passes_and_one_that_stands_still_does_not() -> None:
    """The body of vLLM's check, with the local engine."""
    model = new_model(ModelSize(32, 1), "test/engine").eval()
    assert levels(engine.follow_weights(LocalEngine(engine.student_of(model), Section()), model, 1e-4)) == ["pass", "pass"]
    still = new_model(ModelSize(32, 1), "test/engine").eval()
    model = new_model(ModelSize(32, 1), "test/engine").eval()
    frozen: Engine = LocalEngine(engine.student_of(still), Section())
    assert levels(engine.follow_weights(frozen, model, 1e-4)) == ["pass", "fail"]


# --- three steps -----------------------------------------------------------------------------------------------------


def test_how_three_steps_are_judged() -> None:
    assert judged("x", Distance(1e-6, 1e-4, True), FLOAT32).level == "pass"
    assert judged("x", Distance(1e-6, 0.5, True), FLOAT32).level == "fail"
    assert judged("x", Distance(0.01, 1e-4, True), FLOAT32).level == "fail"
    moved = judged("x", Distance(0.05, 0.4, False), FLOAT32)
    assert (moved.level, "other tokens were drawn" in moved.message) == ("warn", True)
    assert judged("x", Distance(0.05, 0.4, False), BFLOAT16).level == "pass"
    assert judged("x", Distance(0.1, 1.2, False), BFLOAT16).level == "fail"


def test_the_tiny_recipe_is_valid_and_its_models_differ(tmp_path: Path) -> None:
    settings = save_tiny(tmp_path)
    config = make_config(settings)
    assert (config.steps, config.rollout.prompts_per_step) == (3, 16)
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 48
    assert {path.name for path in tmp_path.iterdir()} == {"student", "teacher", "prompts.jsonl"}


def test_a_training_that_dies_is_a_finding_and_a_recipe_brings_its_method(tmp_path: Path, monkeypatch: Any) -> None:
    """The trainings themselves run in tests/gpu."""
    started: list[tuple[str, dict[str, Any]]] = []
    codes = iter([0, -9, None])

    def train(settings: dict[str, Any], run: Path, device: str) -> list[Ended]:
        started.append((device, settings))
        make_config(settings)
        return [Ended(next(codes), "torch.OutOfMemoryError: CUDA out of memory")]

    monkeypatch.setattr(steps, "train", train)
    config = make_config({"models": {"world": "clean"}, "method": {"objective": "divergence", "weights": "survival"}})
    killed, slow = steps.check_steps("cuda:0", config, tmp_path)
    assert "training in float32 on cuda:0 was killed by SIGKILL" in killed.message
    assert "training in bfloat16 autocast on cuda:0 gave no answer in time" in slow.message
    assert "out of memory" in killed.details
    assert [device for device, _ in started] == ["cpu", "cuda:0", "cuda:0"]
    assert [settings.get("precision", "no") for _, settings in started] == ["no", "no", "bf16"]
    assert {settings["method"]["objective"] for _, settings in started} == {"divergence"}
    codes = iter([1])
    (nothing,) = steps.check_steps("cuda:0", None, tmp_path)
    assert "there is nothing to compare with" in nothing.message


# --- the list --------------------------------------------------------------------------------------------------------


def test_the_verdict_is_ready_or_what_to_do() -> None:
    fine = [passed("a", "good"), warning("b", "slow", "hurry")]
    assert verdict(fine) == "ready"
    bad = [*fine, failure("c", "broken", "mend it"), failure("c", "also broken", "mend it"), failure("d", "gone", "find it")]
    assert verdict(bad) == "not ready: c: mend it; d: find it"


def test_a_crash_of_a_check_is_a_finding_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dies"
    program.write_text("#!/bin/sh\necho 'CUDA error: an illegal instruction was encountered' >&2\nkill -ILL $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(checklist, "CHILD", (str(program),))
    (found,) = run_isolated("products", Subject("cpu", None, ()), tmp_path, 60)
    assert found.level == "fail"
    assert "was killed by SIGILL" in found.message
    assert "illegal instruction" in found.details


def test_a_check_that_fails_itself_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject, folder: Path) -> Iterator[Finding]:
        yield passed("one", "begins")
        raise FileNotFoundError("metrics.jsonl")

    def fine(subject: Subject, folder: Path) -> Iterator[Finding]:
        assert folder.is_dir()
        assert not list(folder.iterdir())
        yield passed("two", "fine")

    monkeypatch.setattr(checklist, "CHECKS", (Check("one", "", 1, broken), Check("two", "", 1, fine)))
    said: list[str] = []
    found = list(examine_gpu("cpu", say=said.append))
    assert [finding.level for finding in found] == ["pass", "fail", "pass"]
    assert "FileNotFoundError: metrics.jsonl" in found[1].message
    assert [line.split()[1] for line in said] == ["one", "two"]


def test_what_a_recipe_needs_and_is_missing_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"models": {"world": "clean", "attention": "flash_attention_2"}, "rollout": {"engine": "vllm"}}
    wanted, free = Subject("cuda:0", make_config(recipe), ()), Subject("cuda:0", None, ())
    monkeypatch.setattr(checklist, "run_isolated", lambda *_: iter([warning("flash", "it is not installed", "install it")]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for check in (checklist._flash, checklist._vllm):
        assert levels(check(free, tmp_path)) == ["warn"]
        assert levels(check(wanted, tmp_path)) == ["fail"]


def test_the_recipes_own_lines_are_part_of_the_list(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(save_tiny(tmp_path)))
    (fine,) = checklist._recipe(Subject("cpu", None, [str(recipe), "--static"]), tmp_path)
    assert fine.level == "pass"
    assert "pass  vocabulary" in fine.details
    (tmp_path / "teacher" / "config.json").unlink()
    (bad,) = checklist._recipe(Subject("cpu", None, [str(recipe), "--static"]), tmp_path)
    assert (bad.level, bad.remedy) == ("fail", "do what its lines say")
    assert "fail  files" in bad.details


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a recipe (iwopd doctor my.toml), or ask for the GPU's checklist (iwopd doctor --gpu)"),
        (["my.toml", "--device", "cuda:1"], "--device goes with --gpu"),
        (["--gpu", "--static"], "leave one of them out"),
        (["no-such.toml", "--gpu"], "no recipe at no-such.toml"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    build(monkeypatch, "2.13.0+cpu", None)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--gpu"])
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fail  device          torch 2.13.0+cpu is a CPU build")
    assert lines[-1].startswith("not ready: device: on the machine with the GPU: pip install")

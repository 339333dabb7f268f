"""Teachers that fit: sent to the CPU while the student trains, and loaded in fewer bits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from iwopd import quantization as quantizing
from iwopd.config import ConfigError, make_config
from iwopd.models import ModelError, ModelSource, load_model
from iwopd.quantization import quantization
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.offload import OffloadedScorer
from iwopd.train.assembly import assemble
from iwopd.train.doctor.machine import check_packages
from iwopd.train.learner import Learner
from iwopd.train.loading import load_teacher
from iwopd.train.memory import ModelShape, RunShape
from iwopd.train.run import run_training
from iwopd.types import Prompt, Rollout
from models import make_model, save_pair
from pretend_gpu import PretendGPU, pretend_gpu

ROLLOUTS = [Rollout(Prompt(str(n), (2, 3 + n)), torch.tensor([4, 5, 6 + n, 1]), torch.zeros(4), "eos") for n in range(5)]


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with pretend_gpu() as opened:
        yield opened


def weights_of(model: Any) -> int:
    """Bytes as the pretend device counts them, in blocks of 512; tied ones once."""
    return sum(-(-one.numel() * one.element_size() // 512) * 512 for one in model.parameters())


# --- offload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_teacher_leaves_and_comes_back_with_the_same_scores(gpu: PretendGPU, kind: str) -> None:
    model = make_model(kind, hidden=64).eval()
    size = weights_of(model)
    before = gpu.memory.allocated
    scorer = OffloadedScorer.of(LocalScorer(model.to(gpu.device), vocab_size=21))
    first = scorer.score(ROLLOUTS)
    here = gpu.memory.allocated
    assert here - before >= size
    scorer.leave()
    scorer.leave()  # it has left
    assert here - gpu.memory.allocated >= size
    assert scorer.lm.device.type == "cpu"
    again = scorer.score(ROLLOUTS)
    assert scorer.lm.device == gpu.device
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    scorer.leave()
    assert scorer.follow().token_bytes > 0  # who follows answers needs it, too
    assert scorer.lm.device == gpu.device


def test_of_a_teacher_that_left_the_matrix_stays_that_somebody_holds(gpu: PretendGPU) -> None:
    scorer = OffloadedScorer.of(LocalScorer(make_model("llama", hidden=64).eval().to(gpu.device), vocab_size=21))
    matrix = scorer.output_matrix()
    expected = matrix.weight.cpu()
    scorer.leave()
    assert matrix.weight.device == gpu.device
    assert torch.equal(matrix.weight.cpu(), expected)


def test_on_a_cpu_it_stays_and_says_so(tmp_path: Path) -> None:
    settings = save_pair(tmp_path)
    said: list[str] = []
    config = make_config({**settings, "models": {**settings["models"], "teacher_offload": True}})
    with assemble(config, said.append) as parts:
        assert any("models.teacher_offload does nothing here" in words for words in said)
        parts.rest_teachers()
        assert isinstance(parts.teacher_scorer, OffloadedScorer)
        assert not parts.teacher_scorer.moves


@pytest.mark.parametrize("method", [{}, {"objective": "divergence"}], ids=["opd", "divergence"])
def test_a_run_trains_without_the_teacher_beside_it(
    gpu: PretendGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    """Bit for bit the same run; in the update the device holds so much less as the teacher takes (but for its matrix)."""
    settings = save_pair(tmp_path) | {"steps": 2, "method": method, "tracking": {"console": "off"}, "checkpoint": {"every": 9}}
    settings |= {"rollout": {"prompts_per_step": 4, "max_tokens": 8}, "threads": torch.get_num_threads()}
    make_model("llama", hidden=128, seed=2).save_pretrained(tmp_path / "teacher")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(gpu.device))
    held: list[int] = []
    update = Learner.update

    def counted(*given: Any, **named: Any) -> Any:
        held.append(gpu.memory.allocated)
        return update(*given, **named)

    monkeypatch.setattr(Learner, "update", counted)

    def trained(name: str, **models: Any) -> tuple[list[Any], int]:
        AcceleratorState._reset_state(reset_partial_state=True)
        assert Accelerator().device == gpu.device
        held.clear()
        config = make_config({**settings, "models": {**settings["models"], **models}})
        run_training(config, tmp_path / name, doctor=False)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        numbers = [(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]
        return numbers, max(held)

    try:
        stays, most = trained("stays")
        leaves, least = trained("leaves", teacher_offload=True)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert stays == leaves
    teacher = make_model("llama", hidden=128, seed=2)
    matrix = 0 if not method else 21 * 128 * 4
    assert most - least >= 0.95 * (weights_of(teacher) - matrix)


def test_a_teacher_that_writes_answers_comes_back_for_it(
    gpu: PretendGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = save_pair(tmp_path)
    settings |= {"rollout": {"prompts_per_step": 4, "max_tokens": 8, "mix": {"share": 0.5, "source": "teacher"}}}
    settings |= {"models": {**settings["models"], "teacher_offload": True}, "threads": torch.get_num_threads()}
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(gpu.device))
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with assemble(make_config(settings), lambda _: None) as parts:
            assert parts.others is not None
            parts.before_writing()
            assert [one.lm.device.type for one in parts.offloaded] == ["cpu"]
            _, given = parts.others.write(parts.order.batch(1), 1)
            assert len(given.rollouts) == 2
            assert [one.lm.device for one in parts.offloaded] == [gpu.device]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("models", "teacher", "words"),
    [
        ({"teacher_offload": True, "teacher_device": "cpu"}, {}, "models.teacher_device is 'cpu'"),
        ({"teacher_offload": True, "teacher_quantize": "8bit"}, {}, "cannot move quantised weights"),
        ({"teacher_offload": True}, {"urls": ["http://127.0.0.1:1"]}, "sleep mode"),
        ({"teacher_quantize": "int8"}, {"urls": ["http://127.0.0.1:1"]}, "--quantization"),
        ({"teacher_quantize": "int8", "teacher": "some/file.gguf"}, {}, "dequantised"),
    ],
)
def test_what_does_not_go_together_is_refused(models: dict[str, Any], teacher: dict[str, Any], words: str) -> None:
    given = {"student": "a", "teacher": "b", **models}
    with pytest.raises(ConfigError, match=words):
        make_config({"models": given, "teacher": teacher, "data": {"prompts": "p.jsonl"}, "rollout": {"max_tokens": 4}})


# --- quantised ------------------------------------------------------------------------------------------------------


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"teacher_quantize = 'int8' needs the package torchao: pip install 'iwopd\[torchao\]'"
    ):
        quantization("int8", "models.teacher_quantize")
    with pytest.raises(ModelError, match=r"bitsandbytes and a GPU: pip install 'iwopd\[qlora\]'"):
        quantization("4bit", "models.teacher_quantize")
    assert quantization("none", "models.teacher_quantize") is None
    config = make_config(
        {
            "models": {"student": "a", "teacher": "b", "teacher_quantize": "int8"},
            "data": {"prompts": "p"},
            "rollout": {"max_tokens": 4},
        }
    )
    (finding,) = check_packages(config)
    assert "torchao" in finding.message
    assert "iwopd[torchao]" in finding.remedy


@pytest.mark.parametrize(("kind", "facts"), [("4bit", {"load_in_4bit": True}), ("8bit", {"load_in_8bit": True})])
def test_transformers_gets_the_config_for_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, facts: dict[str, bool]
) -> None:
    """Bitsandbytes computes on GPUs: here it is seen what transformers is handed, for the teacher and nobody else."""
    settings = save_pair(tmp_path)
    config = make_config({**settings, "models": {**settings["models"], "teacher_quantize": kind}})
    handed: list[Any] = []
    monkeypatch.setattr(quantizing, "missing_package", lambda kind: None)
    monkeypatch.setattr("transformers.BitsAndBytesConfig.post_init", lambda self: None)

    def loaded(source: Any, *, quantization: Any = None, **options: Any) -> Any:
        handed.append(quantization)
        return load_model(source, **options)

    monkeypatch.setattr("iwopd.train.loading.load_model", loaded)
    load_teacher(config, ModelSource.of(tmp_path / "teacher"), torch.device("cpu"))
    (given,) = handed
    assert {name: getattr(given, name) for name in facts} == facts


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_a_teacher_in_int8_teaches(tmp_path: Path) -> None:
    settings = save_pair(tmp_path) | {"steps": 1, "tracking": {"console": "off"}}
    config = make_config({**settings, "models": {**settings["models"], "teacher_quantize": "int8"}})
    with assemble(config, print) as parts, assemble(make_config(settings), print) as plain:
        rough, exact = (torch.cat(one.teacher_scorer.score(ROLLOUTS)) for one in (parts, plain))
    difference = float((rough - exact).abs().mean())
    assert 0 < difference < 0.2
    run_training(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["tokens"] > 0


# --- the memory model -----------------------------------------------------------------------------------------------


def shape(**changes: Any) -> RunShape:
    """A small student under a teacher ten times as wide."""
    models = {"student": "a", "teacher": "b", **changes.pop("models", {})}
    config = make_config({"models": models, "data": {"prompts": "p"}, "rollout": {"max_tokens": 4}, **changes})
    student, teacher = (ModelShape.of(make_model("llama", hidden=hidden).config) for hidden in (32, 320))
    return RunShape(config=config, student=student, teachers={"teacher": teacher}, reference=None, longest=32)


def test_the_memory_model_knows_that_it_leaves() -> None:
    stays, leaves = shape(), shape(models={"teacher_offload": True})
    size = stays.on_one_device().state["teachers"]
    memory = leaves.on_one_device()
    assert memory.state["teachers"] == 0
    assert memory.parts_of("backward pass")["teachers"] == 0
    assert memory.parts_of("rollouts")["teachers"] == 0
    assert memory.parts_of("scores")["teachers"] == size > 0
    assert stays.on_one_device().needed("backward pass") - memory.needed("backward pass") == size
    assert leaves.in_main_memory(2) - stays.in_main_memory(2) == 2 * size
    assert leaves.on_one_device(gpus=0).state["teachers"] == size  # a CPU has nowhere to send it
    whole = shape(models={"teacher_offload": True}, method={"objective": "divergence"}).on_one_device()
    matrix = 21 * 320 * 4
    assert whole.parts_of("backward pass")["teachers"] == matrix
    assert whole.parts_of("scores")["teachers"] == size + matrix
    early = shape(models={"teacher_offload": True}, rollout={"max_tokens": 4, "overlap": True}).on_one_device()
    assert early.parts_of("rollouts")["teachers"] == size


@pytest.mark.parametrize(("kind", "bytes_each"), [("int8", 1.0), ("8bit", 1.0), ("4bit", 0.55)])
def test_the_memory_model_counts_fewer_bits(kind: str, bytes_each: float) -> None:
    plain, small = shape(), shape(models={"teacher_quantize": kind})
    layers = plain.teachers["teacher"].count.layers
    saved = plain.on_one_device().state["teachers"] - small.on_one_device().state["teachers"]
    assert saved == pytest.approx(layers * (4 - bytes_each))

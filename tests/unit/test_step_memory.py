"""The memory estimate: parameters against published sizes and real models, the rest against sums done by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from iwopd import tiny
from iwopd.adapters import add_adapter
from iwopd.cluster.plan import GPUS, open_workload
from iwopd.cluster.plan.layout import layouts, local_layout
from iwopd.cluster.plan.public_models import PUBLIC, make_config
from iwopd.config import Config, Lora, Optim, load_config
from iwopd.tiny.architecture import new_model
from iwopd.train.doctor.case import Case, open_case
from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.resources import check_resources, step_memory
from iwopd.train.loading import world_recipe
from iwopd.train.memory import ModelShape, StepMemory, Stored, TrainedModel, device_memory
from models import make_model

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "recipes" / "paper"
RECIPE = PAPER / "qwen3-1.7b-from-qwen3-4b-instruct-2507-iw-opd-math.toml"
EXOPD = PAPER / "qwen3-4b-from-qwen3-30b-a3b-instruct-2507-exopd-math.toml"
H100 = GPUS["h100"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_memory", ROOT / "bench" / "gpu_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_memory"] = module
    spec.loader.exec_module(module)
    return module


# --- shapes and sums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_parameters_are_those_of_the_model(kind: str) -> None:
    model = make_model(kind)
    assert ModelShape.of(model.config).count.total == sum(parameter.numel() for parameter in model.parameters())


def test_the_public_sizes(bench: ModuleType) -> None:
    published = {"0.6B": 596_049_920, "1.7B": 1.72e9, "4B": 4.02e9, "30B-A3B": 30.5e9, "235B-A22B": 235.1e9}
    for name, size in published.items():
        assert bench.SHAPES[f"Qwen3-{name}"].count.total == pytest.approx(size, rel=0.002)


CONFIG = Qwen3Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)
MATRICES = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
SIZE = 1000 * 64 + MATRICES + 3 * (2 * 64 + 2 * 16) + 64


def test_a_step_by_hand() -> None:
    shape = ModelShape.of(CONFIG)
    assert (shape.count.total, shape.count.layers) == (SIZE, MATRICES)
    assert shape.cache_elements == 3 * 2 * 2 * 16
    kept = 8 * 64 + 4 * (4 + 2) * 16 + 4 * 128
    assert shape.activation_elements(gradient_checkpointing=False) == 3 * kept
    assert shape.activation_elements(gradient_checkpointing=True) == 3 * 64 + kept
    student = TrainedModel(shape, number_bytes=4, compute_bytes=2, gradient_checkpointing=False)
    needed = device_memory(student, 10, teachers=(Stored(shape, 2), Stored(shape, 2, 0.5)), reference=Stored(shape, 4))
    assert (needed.weights, needed.gradients, needed.adam) == (4 * SIZE, 4 * SIZE, 8 * SIZE)
    assert (needed.teachers, needed.reference) == (3 * SIZE, 4 * SIZE)
    assert needed.activations == 10 * 3 * kept * 2
    assert needed.autocast_copies == 2 * MATRICES
    assert needed.head == 4 * 2 * 10 * 1000 + 4 * 1000 * 64  # shorter than a chunk; and the output matrix's gradient
    assert needed.total == needed.update == sum(needed.update_parts.values())
    assert needed.checkpoint == 12 * SIZE
    spread = device_memory(student, 10, shards=2, on_verl=True)
    assert (spread.weights, spread.gradients, spread.adam) == (2 * SIZE, 2 * SIZE, 4 * SIZE)
    assert (spread.autocast_copies, spread.head) == (0, 2 * 2 * 10 * 1000 + 4 * 1000 * 64)


@pytest.mark.parametrize(("quantized", "matrix"), [(None, 2), (0.55, 0.55)])
def test_an_adapter_trains_little(quantized: float | None, matrix: float) -> None:
    student = TrainedModel(ModelShape.of(CONFIG), number_bytes=2, adapter=100, quantized_bytes=quantized)
    needed = device_memory(student, 1)
    assert needed.weights == pytest.approx(matrix * MATRICES + 2 * (SIZE - MATRICES) + 400)
    assert (needed.gradients, needed.adam, needed.checkpoint) == (400, 800, 1200)


@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_a_real_learner_holds_what_is_counted(dtype: str, rank: int) -> None:
    """Weights, gradients and Adam's moments of a real update, byte by byte."""
    model = make_model("qwen3").to(getattr(torch, dtype))
    if rank:
        add_adapter(model, rank, 32.0, ["all-linear"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=Optim().lr, fused=True)  # as in `train/learner.py`
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.float().sum().backward()
    optimizer.step()
    shape = ModelShape.of(make_model("qwen3").config)
    adapter = shape.adapter_parameters(Lora(rank=rank)) if rank else 0
    needed = device_memory(TrainedModel(shape, number_bytes={"float32": 4, "bfloat16": 2}[dtype], adapter=adapter), 1)
    assert needed.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert needed.gradients == sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    moments = (value for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert needed.adam == sum(value.nbytes for value in moments)


def test_autocast_keeps_copies_of_the_matrices() -> None:
    model = make_model("qwen3").train()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=torch.ones(1, 1, dtype=torch.long)).last_hidden_state
    matrices = {parameter.numel() for name, parameter in model.model.layers.named_parameters() if parameter.dim() == 2}
    saved = 2 * sum(size for size in kept.values() if size in matrices)
    assert hidden.requires_grad
    assert saved == TrainedModel(ModelShape.of(model.config)).autocast_copies


# --- recipes --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders that hold the public models' config.json and nothing else."""
    root = tmp_path_factory.mktemp("configs")
    for name, shape in PUBLIC.items():
        make_config(shape).save_pretrained(root / name)
    return {name: str(root / name) for name in PUBLIC}


def read(recipe: Path, folders: dict[str, str], **overrides: Any) -> Config:
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    config = load_config(recipe, settings)
    if config.models.world is not None:
        return config
    names = {role: str(getattr(config.models, role)).removeprefix("Qwen/") for role in ("student", "teacher")}
    chosen = {f"models.{role}": folders[name.removesuffix("-Instruct-2507")] for role, name in names.items()}
    return load_config(recipe, chosen | settings)


def planned(config: Config) -> dict[str, float]:
    (need,) = local_layout(open_workload(config), H100).needs
    return {**need.parts, "total": need.needed}


def examined(config: Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """By the doctor, on a machine with one H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(H100.memory), int(H100.memory)))
    seen: list[StepMemory] = []

    def judge(memory: StepMemory, **_: Any) -> list[Finding]:
        seen.append(memory)
        return []

    monkeypatch.setattr("iwopd.train.doctor.resources._memory", judge)
    recipe = world_recipe(config)
    if recipe is None:
        list(check_resources(open_case(config, Path("run"))))
    else:
        models = {"student": new_model(recipe.student.size, "a"), "teacher": new_model(recipe.teacher.size, "b")}
        if config.method.made.needs_reference:
            models["reference"] = models["student"] if config.lora.rank else new_model(recipe.student.size, "c")
        world = tiny.World(recipe, Path("teacher"), Path("student"))
        limit = config.rollout.max_tokens or world.max_response_tokens
        list(check_resources(Case(config, {}, limit, Path("run"), world.prompts(64)), models))
    (memory,) = seen
    return {**memory.parts, "total": memory.total}


CASES: list[tuple[Path, dict[str, Any]]] = [
    *((ROOT / "recipes" / "tiny" / f"{name}.toml", {}) for name in ("opd", "exopd", "curriculum")),
    (ROOT / "recipes" / "tiny" / "exopd.toml", {"models__dtype": "bfloat16", "lora__rank": 4}),
    (RECIPE, {}),
    (RECIPE, {"models__dtype": "bfloat16"}),
    (RECIPE, {"precision": "no", "optim__gradient_checkpointing": False}),
    (RECIPE, {"lora__rank": 16, "models__dtype": "bfloat16", "lora__quantize": "4bit"}),
    (RECIPE, {"teacher__urls": ["http://gpu:8000"]}),
    (RECIPE, {"models__teacher_device": "cuda:1"}),
    (RECIPE, {"models__teacher_device": "auto", "models__teacher_dtype": "float32"}),
    (RECIPE, {"rollout__engine": "vllm"}),
    (RECIPE, {"rollout__engine": "vllm", "engine__vllm__sleep": True, "engine__vllm__dtype": "bfloat16"}),
    (EXOPD, {}),
    (EXOPD, {"lora__rank": 16}),
]


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_doctor_and_plan_agree(
    recipe: Path, overrides: dict[str, Any], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read(recipe, folders, **overrides)
    parts = planned(config)
    assert examined(config, monkeypatch) == parts
    assert parts["total"] > 0


def test_doctor_and_plan_agree_on_further_models(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"code": {"model": folders["Qwen3-0.6B"]}, "far": {"urls": ["http://gpu:8000"]}}
    config = read(EXOPD, folders, teacher__others=others, models__reference=folders["Qwen3-0.6B"])
    parts = planned(config)
    assert examined(config, monkeypatch) == parts
    sizes = {name: ModelShape.of(make_config(PUBLIC[name])).count.total for name in ("Qwen3-0.6B", "Qwen3-30B-A3B")}
    assert parts["teachers"] == 2 * sum(sizes.values())
    assert parts["reference"] == 4 * sizes["Qwen3-0.6B"]


def test_bfloat16_weights_have_bfloat16_gradients_and_moments(folders: dict[str, str]) -> None:
    config = read(RECIPE, folders, models__dtype="bfloat16")
    work, parts = open_workload(config), planned(config)
    size = work.student.count.total
    assert (parts["weights"], parts["gradients"], parts["adam"]) == (2 * size, 2 * size, 4 * size)
    on_verl = next(layouts(work, H100, 1, 8))
    shard = on_verl.student_gpus
    assert [on_verl.needs[0].parts[name] * shard for name in ("weights", "gradients", "adam")] == [2 * size, 2 * size, 4 * size]


def test_the_doctor_knows_the_precision(folders: dict[str, str]) -> None:
    def activations(precision: str) -> float:
        case = open_case(read(RECIPE, folders, precision=precision), Path("run"))
        return step_memory(case, {"student": case.student.config}).activations

    assert activations("no") == 2 * activations("bf16")


@pytest.mark.parametrize(
    ("device", "gpus", "share"),
    [(None, 1, 1), ("cuda:0", 1, 1), ("auto", 1, 1), ("auto", 4, 0.25), ("cuda:1", 2, 0), ("cpu", 1, 0), ("cpu", 0, 1)],
)
def test_where_the_teacher_is(device: str | None, gpus: int, share: float, folders: dict[str, str]) -> None:
    work = open_workload(read(RECIPE, folders, **({} if device is None else {"models__teacher_device": device})))
    assert work.on_one_device(gpus=gpus).teachers == share * 2 * work.teachers["teacher"].count.total


def test_a_local_engine_has_the_dtype_of_the_models(folders: dict[str, str]) -> None:
    """On verl it follows `precision`, as the launcher tells it."""
    work = open_workload(read(RECIPE, folders, rollout__engine="vllm"))
    size = work.student.count.total
    assert work.on_one_device(memory=H100.memory).writer.weights == 4 * size
    assert work.on_verl(gpus=4, engine_shards=2, gpu_memory=H100.memory).writer.weights == 2 * size / 2


def test_the_cache_of_the_sampler_has_the_dtype_of_the_weights(folders: dict[str, str]) -> None:
    """Autocast is the update's: the sampler writes with the weights as they are."""
    parts, half = (planned(read(RECIPE, folders, models__dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert parts["cache"] == 2 * half["cache"]
    assert parts["activations"] == half["activations"]


def test_an_unreadable_teacher_is_named(folders: dict[str, str], tmp_path: Path) -> None:
    others = {"code": {"model": str(tmp_path / "nothing")}}
    (first, *_) = check_resources(open_case(read(RECIPE, folders, teacher__others=others), tmp_path))
    assert (first.level, first.check) == ("warn", "memory")
    assert "the teacher 'code' is not counted" in first.text()


def test_every_teacher_has_copies_in_the_pool(folders: dict[str, str]) -> None:
    others = {"code": {"model": folders["Qwen3-30B-A3B"]}}
    found = list(layouts(open_workload(read(RECIPE, folders, teacher__others=others)), H100, 2, 8))
    for layout in found:
        assert layout.teacher_gpus == 2 * layout.teacher_copies * layout.teacher_shards
        small, large = layout.needs[2:]
        assert (small.who, large.who) == ("teacher", "teacher 'code'")
        assert small.parts["weights"] < large.parts["weights"]
    assert {layout.teacher_shards for layout in found if layout.fits} == {2}  # the smallest with which the larger one fits


# --- the page -------------------------------------------------------------------------------------------------------------


def test_the_docs_hold_what_the_bench_prints(bench: ModuleType) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    for table in bench.TABLES:
        for line in "\n".join(table()).splitlines():
            assert line in text, f"docs/gpu.md lacks: {line}; run bench/gpu_memory.py"

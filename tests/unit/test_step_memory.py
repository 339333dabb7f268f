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
from iwopd.algo.objectives import make_objective
from iwopd.cluster.plan import GPUS, open_workload
from iwopd.cluster.plan.layout import layouts, local_layout
from iwopd.cluster.plan.public_models import PUBLIC, make_config
from iwopd.config import Config, Lora, Optim, load_config
from iwopd.lm import ResponseModel
from iwopd.tiny.architecture import new_model
from iwopd.train.doctor import resources
from iwopd.train.doctor.case import Case, open_case
from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.resources import check_resources, run_shape, step_memory
from iwopd.train.learner import Learner
from iwopd.train.loading import world_recipe
from iwopd.train.memory import UPDATE, DeviceMemory, ModelShape, StepMemory, Stored, Tokens, TrainedModel
from iwopd.train.ranks import Launched, Ranks
from models import make_model

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "src" / "iwopd" / "recipes" / "paper"
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


TOKENS = Tokens(update=10, scores=20)


def test_a_step_by_hand() -> None:
    shape = ModelShape.of(CONFIG)
    assert (shape.count.total, shape.count.layers) == (SIZE, MATRICES)
    assert shape.cache_elements == 3 * 2 * 2 * 16
    student = TrainedModel(shape, number_bytes=4, autocast=True, gradient_checkpointing=False)
    teachers = (Stored(shape, 2), Stored(shape, 2, 0.5))
    step = DeviceMemory(student=student, tokens=TOKENS, teachers=teachers, reference=Stored(shape, 4)).step
    state = {"weights": 4 * SIZE, "masters": 0, "adam": 8 * SIZE, "teachers": 3 * SIZE, "reference": 4 * SIZE}
    assert step.state == {**state, "kept evidence": 0}
    sums = 4 * (2 + 2 * 4 + 2)  # of norms and of the softmax
    layer = (8 + 2 * 4 + 5 * 2) * 64 + (4 + 3 * 2) * (64 + 32) + 2 * 64 + 4 * 2 * 128 + sums
    assert student.on_its_way.saved_by_layer == layer
    loss = step.stages["loss"]
    assert loss["activations"] == 10 * (3 * layer + 24 * 64)
    assert (loss["gradients"], loss["autocast copies"]) == (4 * SIZE, 2 * MATRICES)
    parts = 4 * (4 * 64 * 64 + 10 * 5 * 64)  # of the gradient, before and after drifts
    assert loss["head"] == 4 * 3 * 10 * 1000 + 4 * 1000 * 64 + parts  # shorter than a chunk; the output matrix's gradient
    assert step.needed("loss") == sum(state.values()) + sum(loss.values())
    assert step.total == step.needed(step.largest()) == max(step.needed(stage) for stage in step.stages)
    assert step.checkpoint == 12 * SIZE


def test_recomputed_layers_keep_their_inputs() -> None:
    """And no copies of autocast: those of trained weights stay until the forward pass ends, those of the layer at work then."""
    shape = ModelShape.of(CONFIG)
    step = DeviceMemory(student=TrainedModel(shape), tokens=TOKENS).step
    assert step.stages["loss"]["activations"] == 10 * (3 * 4 * 64 + 24 * 64)
    copies = [step.stages[stage]["autocast copies"] for stage in UPDATE]
    assert copies == [2 * MATRICES, *2 * [2 * shape.count.largest_layer]]


def test_shards_and_what_is_gathered_of_them() -> None:
    shape = ModelShape.of(CONFIG)
    gathered = 1000 * 64 + 64 + 2 * shape.count.largest_layer
    here = DeviceMemory(student=TrainedModel(shape), tokens=TOKENS, shards=4).step
    assert here.state["weights"] == SIZE
    assert (here.state["adam"], here.stages["loss"]["gradients"]) == (2 * SIZE, SIZE)
    assert here.stages["backward pass"]["gathered layers"] == 2 * 4 * gathered  # weights and gradients
    assert [here.stages[stage].get("whole student", 0) for stage in ("rollouts", "scores", *UPDATE)] == [4 * SIZE] * 2 + [0] * 3
    verl = DeviceMemory(student=TrainedModel(shape), tokens=TOKENS, shards=4, on_verl=True).step
    assert (verl.state["weights"], verl.stages["loss"]["autocast copies"]) == (SIZE, 0)
    assert verl.stages["loss"]["head"] == 2 * 2 * 10 * 1000 + 4 * 1000 * 64  # two copies of all logits
    assert verl.stages["loss"]["gathered layers"] == 2 * 2 * gathered


@pytest.mark.parametrize("shards", [1, 2])
def test_half_precision_trains_on_masters(shards: int) -> None:
    """So it saves little: 18 instead of 16 bytes a weight, and with shards the masters are what is gathered."""
    student = TrainedModel(ModelShape.of(CONFIG), number_bytes=2)
    step = DeviceMemory(student=student, tokens=TOKENS, shards=shards).step
    own = [step.state[name] * shards for name in ("weights", "masters", "adam")]
    assert own == ([2 * SIZE, 4 * SIZE, 8 * SIZE] if shards == 1 else [4 * SIZE, 0, 8 * SIZE])
    assert step.stages["loss"]["gradients"] == 4 * SIZE / shards
    assert step.checkpoint == 14 * SIZE


@pytest.mark.parametrize(("quantized", "matrix"), [(None, 2), (0.55, 0.55)])
def test_an_adapter_trains_little(quantized: float | None, matrix: float) -> None:
    student = TrainedModel(ModelShape.of(CONFIG), number_bytes=2, adapter=100, adapter_rank=1, quantized_bytes=quantized)
    step = DeviceMemory(student=student, tokens=TOKENS).step
    assert step.state["weights"] == pytest.approx(matrix * MATRICES + 2 * (SIZE - MATRICES) + 400)
    assert (step.stages["loss"]["gradients"], step.state["masters"], step.state["adam"], step.checkpoint) == (400, 0, 800, 1200)


@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_a_real_learner_holds_what_is_counted(dtype: str, rank: int) -> None:
    """Weights, masters, gradients and Adam's moments, byte by byte."""
    model = make_model("qwen3").to(getattr(torch, dtype))
    if rank:
        add_adapter(model, rank, 32.0, ["all-linear"])
    learner = Learner(ResponseModel(model), Optim(), make_objective({}), Ranks())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.float().sum().backward()
    trained = learner.weights.parameters
    gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    learner.optimizer.step()
    shape = ModelShape.of(make_model("qwen3").config)
    adapter = shape.adapter_parameters(Lora(rank=rank)) if rank else 0
    student = TrainedModel(shape, getattr(torch, dtype).itemsize, autocast=False, adapter=adapter, adapter_rank=rank)
    step = DeviceMemory(student=student, tokens=TOKENS).step
    assert step.state["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    assert step.state["masters"] == sum(parameter.nbytes for parameter in learner.weights.masters.values())
    assert step.stages["loss"]["gradients"] == gradients
    moments = (value for state in learner.optimizer.state.values() for name, value in state.items() if name != "step")
    assert step.state["adam"] == sum(value.nbytes for value in moments)


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
    monkeypatch.setattr(resources, "accelerators", lambda _: resources.Accelerators(1, int(H100.memory), int(H100.memory)))
    seen: list[StepMemory] = []

    def judge(memory: StepMemory, *_: Any, **__: Any) -> list[Finding]:
        seen.append(memory)
        return []

    monkeypatch.setattr(resources, "_memory", judge)
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
    *((ROOT / "src" / "iwopd" / "recipes" / "tiny" / f"{name}.toml", {}) for name in ("opd", "exopd", "curriculum")),
    (ROOT / "src" / "iwopd" / "recipes" / "tiny" / "exopd.toml", {"models__dtype": "bfloat16", "lora__rank": 4}),
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
    (ROOT / "src" / "iwopd" / "recipes" / "tiny" / "survival.toml", {"rollout__horizon__type": "drift"}),
    (RECIPE, {"rollout__horizon__type": "drift"}),
    (RECIPE, {"rollout__horizon__type": "budget", "rollout__horizon__tokens": 2**24, "models__teacher_device": "cuda:1"}),
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


def test_bfloat16_weights_save_little(folders: dict[str, str]) -> None:
    """Not the remedy that it seems: masters, moments and gradients are float32."""
    whole, half = (planned(read(RECIPE, folders, models__dtype=dtype)) for dtype in ("float32", "bfloat16"))
    size = open_workload(read(RECIPE, folders)).student.count.total
    own = [half[name] for name in ("weights", "masters", "adam")]
    assert own == [2 * size, 4 * size, 8 * size]
    assert 0.9 * whole["total"] < half["total"]
    on_verl = next(layouts(open_workload(read(RECIPE, folders, models__dtype="bfloat16")), H100, 1, 8))
    shard = on_verl.student_gpus
    assert [on_verl.needs[0].parts[name] * shard for name in ("weights", "gradients", "adam")] == [4 * size, 4 * size, 8 * size]


@pytest.mark.parametrize(
    ("device", "gpus", "share"),
    [(None, 1, 1), ("cuda:0", 1, 1), ("auto", 1, 1), ("auto", 4, 0.25), ("cuda:1", 2, 0), ("cpu", 1, 0), ("cpu", 0, 1)],
)
def test_where_the_teacher_is(device: str | None, gpus: int, share: float, folders: dict[str, str]) -> None:
    work = open_workload(read(RECIPE, folders, **({} if device is None else {"models__teacher_device": device})))
    assert work.on_one_device(gpus=gpus).state["teachers"] == share * 2 * work.teachers["teacher"].count.total


def test_a_writer_has_the_precision_of_the_run(folders: dict[str, str]) -> None:
    """The sampler's cache, the copies that it writes with, and an engine's copy of the student."""
    work = open_workload(read(RECIPE, folders))
    row = 1.1 * work.longest * work.student.cache_elements
    sampler = work.on_one_device().writer
    assert [sampler.cache, sampler.weights] == pytest.approx([2 * row, 2 * work.student.count.layers])
    whole = open_workload(read(RECIPE, folders, precision="no")).on_one_device().writer
    assert [whole.cache, whole.weights] == pytest.approx([4 * row, 0])
    engine = open_workload(read(RECIPE, folders, rollout__engine="vllm"))
    size = work.student.count.total
    assert engine.on_one_device(memory=H100.memory).writer.weights == 2 * size
    assert engine.on_verl(gpus=4, engine_shards=2, gpu_memory=H100.memory).writer.weights == 2 * size / 2
    single = open_workload(read(RECIPE, folders, rollout__engine="vllm", precision="no"))
    assert single.on_one_device(memory=H100.memory).writer.weights == 4 * size


def test_a_teacher_that_follows_answers(folders: dict[str, str]) -> None:
    """Its cache, bounded as the sampler's is, and what reading a block takes, while answers are written."""
    work = open_workload(read(RECIPE, folders, rollout__horizon__type="drift"))
    row = 2 * work.longest * work.teachers["teacher"].cache_elements * 2
    on_gpu, on_cpu = work.on_one_device(), work.on_one_device(gpus=0)
    assert on_gpu.stages["rollouts"]["teacher's cache"] == row
    assert on_gpu.stages["rollouts"]["scoring"] == on_gpu.stages["scores"]["scoring"] > 0
    assert on_cpu.stages["rollouts"]["teacher's cache"] == max(1, 2**31 // row) * row
    assert "teacher's cache" not in on_gpu.stages["scores"]
    few = {"rollout__prompts_per_step": 2, "rollout__max_tokens": 64, "data__max_prompt_tokens": 64}
    small = open_workload(read(RECIPE, folders, rollout__horizon__type="drift", **few))
    assert small.on_one_device(gpus=0).stages["rollouts"]["teacher's cache"] == 2 * row * small.longest / work.longest
    budget = {"rollout__horizon__type": "budget", "rollout__horizon__tokens": 8 * 16}
    more = open_workload(read(RECIPE, folders, **budget, **few))
    assert more.on_one_device(gpus=0).stages["rollouts"]["teacher's cache"] == 16 * row * more.longest / work.longest
    elsewhere = read(RECIPE, folders, rollout__horizon__type="drift", models__teacher_device="cuda:1")
    assert "teacher's cache" not in open_workload(elsewhere).on_one_device(gpus=2).stages["rollouts"]
    in_main = read(RECIPE, folders, rollout__horizon__type="drift", models__teacher_device="cpu")
    without = read(RECIPE, folders, models__teacher_device="cpu")
    cached = open_workload(in_main).in_main_memory(1) - open_workload(without).in_main_memory(1)
    assert cached == on_cpu.stages["rollouts"]["teacher's cache"]


def test_scores_are_a_stage_of_their_own(folders: dict[str, str]) -> None:
    """65,536 tokens at a time: with recomputed layers and short micro-batches they take the most."""
    work = open_workload(read(RECIPE, folders, rollout__max_tokens=1024, optim__token_budget=3072))
    memory = work.on_one_device()
    teacher = Stored(work.teachers["teacher"], 2)
    student = TrainedModel(work.student)
    assert memory.stages["scores"]["scoring"] == max(
        2**16 * student.on_its_way.reading + 2 * work.student.count.layers, 2**16 * teacher.reading
    )
    short = {"rollout__max_tokens": 1024, "optim__token_budget": 3072}
    adapter = open_workload(read(RECIPE, folders, lora__rank=16, models__dtype="bfloat16", **short))
    assert adapter.on_one_device().largest() == "scores"


def test_ranks_share_the_rollouts_and_with_shards_the_weights(folders: dict[str, str]) -> None:
    work = open_workload(read(RECIPE, folders))
    spread = open_workload(read(RECIPE, folders, optim__shard=True))
    alone, eight, sharded = work.on_one_device(), work.on_one_device(ranks=8), spread.on_one_device(ranks=8)
    assert alone.state == eight.state
    size = work.student.count.total
    assert [sharded.state[name] for name in ("weights", "adam")] == [4 * size / 8, 8 * size / 8]
    assert sharded.stages["rollouts"]["whole student"] == 4 * size
    assert sharded.total < 0.6 * alone.total
    few = {"rollout__prompts_per_step": 4, "rollout__max_tokens": 128, "data__max_prompt_tokens": 128}
    short = open_workload(read(RECIPE, folders, **few))
    assert short.on_one_device(ranks=2).stages["loss"]["activations"] == short.on_one_device().stages["loss"]["activations"] / 2


def test_a_pass_that_waits_is_counted_beside_the_scores(folders: dict[str, str]) -> None:
    few = {"rollout__prompts_per_step": 4, "rollout__max_tokens": 128, "data__max_prompt_tokens": 128}
    one = open_workload(read(RECIPE, folders, **few)).on_one_device()
    several = open_workload(read(RECIPE, folders, **few, optim__mini_batches=2)).on_one_device()
    assert one.stages["scores"]["activations"] > 0
    assert "activations" not in several.stages["scores"]


def test_teachers_on_the_cpu_are_copies_in_main_memory(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(RECIPE, folders, models__teacher_device="cpu")
    work = open_workload(config)
    one, two = work.in_main_memory(1), work.in_main_memory(2)
    teacher = Stored(work.teachers["teacher"], 2)
    assert one == teacher.weights + work.longest * teacher.reading
    assert two == 2 * one
    assert open_workload(read(RECIPE, folders)).in_main_memory(8) == 0
    monkeypatch.setattr(resources, "accelerators", lambda _: resources.Accelerators(8, int(H100.memory), int(H100.memory)))
    monkeypatch.setattr(resources, "main_memory", lambda: int(5 * one))
    found = {}
    for ranks in (1, 8):
        lines = check_resources(open_case(config, Path("run")), ranks=Launched(ranks, ranks))
        found[ranks] = [finding for finding in lines if "teachers on the CPU" in finding.message]
    assert [finding.level for finding in found[1]] == ["pass"]
    assert [finding.level for finding in found[8]] == ["fail"]
    assert "8 copies" in found[8][0].message


def test_processes_on_a_machine_without_gpus_share_its_memory(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = open_case(read(RECIPE, folders), Path("run"))
    need = step_memory(run_shape(case, {"student": case.student.config, "teacher": case.teacher.config}), None, 2).total
    monkeypatch.setattr(resources, "main_memory", lambda: int(1.5 * need))
    levels = {}
    for ranks in (1, 2):
        lines = check_resources(case, ranks=Launched(ranks, ranks))
        levels[ranks] = next(finding.level for finding in lines if finding.check == "memory")
    assert levels == {1: "pass", 2: "fail"}


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

"""The plan: sums done by hand, FLOPs as torch counts them, memory as measured, and the page that shows them."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from iwopd.cluster.plan import GPUS, PlanError, as_dict, find_gpu, make_plan, open_workload, report
from iwopd.cluster.plan.estimate import step_time
from iwopd.cluster.plan.layout import layouts
from iwopd.cluster.plan.public_models import PUBLIC, make_config, public_config, read_model
from iwopd.cluster.plan.rates import FAST, SLOW, TYPICAL
from iwopd.cluster.plan.rollouts import answer_lengths, decode_seconds, step_seconds
from iwopd.cluster.plan.work import all_flops, decode_bytes, forward_flops, gathered_bytes, update_flops
from iwopd.cluster.plan.workload import Workload
from iwopd.config import load_config
from iwopd.config import make_config as make_settings
from iwopd.models import ModelSource
from iwopd.train.memory import ModelShape
from models import make_model

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "src" / "iwopd" / "recipes" / "paper"
RECIPE = PAPER / "qwen3-4b-from-qwen3-30b-a3b-instruct-2507-iw-opd-math.toml"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_bench", ROOT / "bench" / "plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_bench"] = module
    spec.loader.exec_module(module)
    return module


def workload(recipe: Path = RECIPE, response_tokens: float | None = None, **overrides: Any) -> Workload:
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    return open_workload(load_config(recipe, settings), response_tokens)


def model(name: str) -> ModelShape:
    return ModelShape.of(make_config(PUBLIC[name]), name)


# --- work -----------------------------------------------------------------------------------------------------------------


def test_flops_are_those_that_torch_counts(bench: ModuleType) -> None:
    checked = {name: (formula, counted) for name, formula, counted in bench.flops()}
    assert len(checked) == 6
    assert all(formula == counted for formula, counted in checked.values()), checked
    formula, counted = bench.decoding_flops()
    assert formula == counted


@pytest.mark.slow
def test_memory_is_what_a_step_takes(bench: ModuleType) -> None:
    for name, predicted, measured in bench.memory():
        assert bench.LEAST < predicted / measured < bench.MOST, name


def test_work_by_hand() -> None:
    small = ModelShape.of(make_model("qwen3").config)  # 2 layers, width 32, 4 heads of 8, 2 key heads, inner 64, 21 ids
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64
    assert small.count.layers == small.count.active == 2 * layer
    assert small.count.head == 21 * 32
    assert forward_flops(small, 10, 4) == 2 * 2 * layer * 10 + 4 * 2 * 32 * 100 / 2 + 2 * 21 * 32 * 4
    plain = forward_flops(small, 10, 0)
    assert update_flops(small, 10, 4, recompute=True) == 4 * plain + 6 * 21 * 32 * 4
    assert all_flops(small, 6, [4, 4]) == 2 * forward_flops(small, 10, 4)
    assert small.cache_elements == 2 * 2 * 2 * 8
    assert decode_bytes(small, 3, 30) == 2 * (2 * layer + 21 * 32) + 30 * 2 * small.cache_elements
    assert decode_bytes(small, 3, 30, 4, 4) == 2 * decode_bytes(small, 3, 30)
    assert gathered_bytes(small, recompute=False) == 8 * small.count.total


def test_what_a_decoding_step_reads_is_there() -> None:
    """Against the tensors of a real model and a real cache."""
    import torch
    from transformers import DynamicCache

    transformer = make_model("qwen3").eval()
    cache: Any = DynamicCache(config=transformer.config)
    with torch.no_grad():
        transformer(input_ids=torch.ones(3, 10, dtype=torch.long), past_key_values=cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    matrices = sum(parameter.nbytes for parameter in transformer.parameters() if parameter.dim() == 2)  # tied: the head once
    assert decode_bytes(ModelShape.of(transformer.config), 3, 30, 4, 4) == matrices + kept


def test_experts_count_as_far_as_they_are_met() -> None:
    mixture = model("Qwen3-30B-A3B")
    assert mixture.active == pytest.approx(3.3e9, rel=0.02)  # what its model card says
    assert model("Qwen3-235B-A22B").active == pytest.approx(22e9, rel=0.02)
    assert mixture.expert_share == pytest.approx(8 / 128)
    one, many = decode_bytes(mixture, 1, 0), decode_bytes(mixture, 1000, 0)
    assert one == pytest.approx(2 * (mixture.count.active + mixture.count.head))
    assert many == pytest.approx(2 * (mixture.count.layers + mixture.count.head), rel=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_parameters_by_use_add_up(kind: str) -> None:
    made = make_model(kind)
    counted = ModelShape.of(made.config).count
    assert counted.total == sum(parameter.numel() for parameter in made.parameters())
    assert counted.head == made.get_output_embeddings().weight.numel()
    assert counted.layers < counted.total - counted.outside + 1


# --- rollouts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [100, 1000, 4096, 12000])
def test_answers_have_the_mean_and_end_in_time(mean: int) -> None:
    lengths = answer_lengths(4000, mean, 16384)
    assert sum(lengths) / 4000 == pytest.approx(mean, rel=0.01)
    assert max(lengths) <= 16384
    assert lengths != sorted(lengths)


def test_answers_that_are_all_cut_off() -> None:
    assert answer_lengths(3, 50, 50) == [50, 50, 50]


def test_the_longest_is_the_longest_of_all() -> None:
    assert max(answer_lengths(8, 100, 10**6, everyone=1024)) == max(answer_lengths(1024, 100, 10**6))


def test_decoding_adds_up_its_steps() -> None:
    small, gpu = model("Qwen3-0.6B"), GPUS["h100"]
    prompt, lengths = 10, [3, 5]

    def one(rows: int, context: float) -> float:
        return step_seconds(small, gpu, TYPICAL, 1, rows, context)

    together = decode_seconds(small, gpu, TYPICAL, shards=1, lengths=lengths, prompt=prompt, most_rows=2)
    assert together == pytest.approx(3 * one(2, 2 * prompt + 3) + 2 * one(1, prompt + 4))
    alone = decode_seconds(small, gpu, TYPICAL, shards=1, lengths=lengths, prompt=prompt, most_rows=1)
    assert alone == pytest.approx(3 * one(1, prompt + 1.5) + 5 * one(1, prompt + 2.5))


# --- models and GPUs ------------------------------------------------------------------------------------------------------


def test_names_of_gpus() -> None:
    assert find_gpu("H100") is GPUS["h100"]
    assert find_gpu("A100") is find_gpu("a100-80") is GPUS["a100-80"]
    assert find_gpu("RTX 4090") is GPUS["rtx4090"]
    with pytest.raises(PlanError, match=r"no such GPU.*did you mean 'h100'.*Known: a100-40"):
        find_gpu("h10")


def test_every_paper_recipe_names_a_known_model() -> None:
    for recipe in PAPER.glob("*.toml"):
        models = load_config(recipe).models
        for name in (models.student, models.teacher):
            assert public_config(str(name)) is not None, name


def test_a_local_folder_comes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path / "Qwen3-4B")
    monkeypatch.chdir(tmp_path)
    assert read_model(ModelSource("Qwen3-4B"), "student").config.model_type == "llama"
    assert public_config("Somebody/Qwen3-4B") is None
    assert public_config("Qwen/Qwen3-4B-Instruct-2507").hidden_size == 2560


# --- layouts and plans ----------------------------------------------------------------------------------------------------


def test_pools_come_out_even() -> None:
    for layout in layouts(workload(), GPUS["h100"], 4, 8):
        assert layout.student_gpus + layout.teacher_gpus == 32
        assert 1024 % layout.student_gpus == 0
        assert layout.teacher_gpus % layout.teacher_shards == 0
        assert layout.teacher_gpus % 8 == 0 or layout.teacher_gpus % 4 == 0
    with pytest.raises(PlanError, match="no split of 2 x 8"):
        list(layouts(workload(rollout__prompts_per_step=7), GPUS["h100"], 2, 8))
    with pytest.raises(PlanError, match=r"engine\.vllm\.tensor_parallel"):
        list(layouts(workload(engine__vllm__tensor_parallel=3), GPUS["h100"], 1, 8))


def test_the_papers_cluster() -> None:
    plan = make_plan(workload(), GPUS["h100"], 4, 8)
    assert plan.fits
    assert plan.layout.trainer == "verl"
    assert plan.fast.total < plan.typical.total < plan.slow.total
    best = plan.typical.total
    assert all(
        step_time(plan.work, other, TYPICAL).total >= best for other in layouts(plan.work, GPUS["h100"], 4, 8) if other.fits
    )
    assert sum(plan.typical.stages().values()) == pytest.approx(best)
    said = report(plan, price=2.0)
    for word in (
        "An estimate",
        "Nothing of it was run on a GPU",
        "assumed",
        "Will it fit? Yes",
        "What is the bottleneck? Rollout",
    ):
        assert word in said
    shown = as_dict(plan, price=2.0)
    assert shown["gpu_hours"]["typical"] == pytest.approx(165 * best / 3600 * 32)
    assert shown["cost"]["typical"] == pytest.approx(2 * shown["gpu_hours"]["typical"])


def test_a_given_length_narrows_the_range() -> None:
    assumed, given = (make_plan(workload(response_tokens=tokens), GPUS["h100"], 1, 8) for tokens in (None, 4096))
    assert assumed.typical.total == pytest.approx(given.typical.total)
    assert assumed.fast.total < given.fast.total < given.slow.total < assumed.slow.total
    with pytest.raises(PlanError, match=r"--response-tokens 20000 must lie in 1\.\.16384"):
        workload(response_tokens=20000)


def test_slower_rates_take_longer() -> None:
    layout = next(iter(layouts(workload(), GPUS["h100"], 1, 8)))
    times = [step_time(workload(), layout, rates).stages() for rates in (FAST, TYPICAL, SLOW)]
    for stage in times[0]:
        assert times[0][stage] <= times[1][stage] <= times[2][stage], stage


def test_more_of_what_counts_costs_more() -> None:
    """The plan answers to the settings it names as ways out."""
    gpu, base = GPUS["h100"], workload()
    layout = next(found for found in layouts(base, gpu, 4, 8) if found.teacher_gpus == 16)
    usual = step_time(base, layout, TYPICAL)
    longer = step_time(replace(base, answer=8192.0), layout, TYPICAL)
    assert longer.rollout > usual.rollout
    assert longer.update > 1.9 * usual.update
    small = next(found for found in layouts(workload(engine__vllm__memory_share=0.2), gpu, 4, 8) if found.teacher_gpus == 16)
    assert small.cache_tokens < 0.5 * layout.cache_tokens
    held_up = step_time(base, small, TYPICAL)
    assert held_up.rollout > 1.2 * usual.rollout
    assert held_up.rollout_limit == "cache"
    wider = workload(optim__token_budget=4 * 18432)
    assert next(iter(layouts(wider, gpu, 4, 8))).needs[0].needed > next(iter(layouts(base, gpu, 4, 8))).needs[0].needed
    exopd = workload(PAPER / "qwen3-4b-from-qwen3-30b-a3b-instruct-2507-exopd-math.toml")
    assert step_time(exopd, layout, TYPICAL).reference > 0


def test_a_gpu_of_ones_own() -> None:
    recipe = PAPER / "qwen3-1.7b-from-qwen3-4b-instruct-2507-iw-opd-math.toml"
    alone = make_plan(workload(recipe), GPUS["h100"], 1, 1)
    assert alone.layout.trainer == "local"
    assert alone.layout.teacher_gpus == 0
    adapter = make_plan(workload(recipe, lora__rank=16), GPUS["h100"], 1, 1)
    assert adapter.work.student.adapter_parameters(adapter.work.config.lora) == 17_432_576
    assert adapter.layout.needs[0].needed < alone.layout.needs[0].needed - 20e9
    server = make_plan(workload(recipe, teacher__urls=["http://gpu:8000"]), GPUS["h100"], 1, 1)
    assert server.work.teachers == {}
    assert server.layout.needs[0].parts["teachers"] == 0
    assert server.typical.teacher == 0
    asleep = make_plan(workload(recipe, rollout__engine="vllm", engine__vllm__sleep=True), GPUS["h100"], 1, 1)
    awake = make_plan(workload(recipe, rollout__engine="vllm"), GPUS["h100"], 1, 1)
    assert asleep.layout.needs[0].needed < awake.layout.needs[0].needed
    assert awake.typical.rollout < alone.typical.rollout
    with pytest.raises(PlanError, match=r"lora.rank is 16, and on verl all weights are trained"):
        make_plan(workload(recipe, lora__rank=16), GPUS["h100"], 1, 8)
    with pytest.raises(PlanError, match=r"teacher.urls is set, and verl starts the teacher itself"):
        make_plan(workload(recipe, teacher__urls=["http://gpu:8000"]), GPUS["h100"], 2, 8)


def test_objectives_that_verl_cannot_carry_are_planned_for_one_gpu() -> None:
    whole = workload(method={"objective": "divergence"})
    with pytest.raises(PlanError, match=r"method.divergence is 'reverse-kl': verl makes the forward KL.*plan for one GPU"):
        make_plan(whole, GPUS["h100"], 1, 8)
    carried = workload(method={"objective": "divergence", "divergence": "forward-kl", "support": "top-k"})
    assert make_plan(carried, GPUS["h100"], 1, 8).layout.trainer == "verl"


def test_several_teachers_share_the_prompts() -> None:
    """Two alike take as long as one: side by side on half of the GPUs each, or one after the other on half of the prompts."""
    twin = {"code": {"model": "Qwen/Qwen3-30B-A3B-Instruct-2507"}}
    one, two = workload(), workload(teacher__others=twin)
    assert list(two.teachers) == ["teacher", "teacher 'code'"]
    split = [next(found for found in layouts(work, GPUS["h100"], 4, 8) if found.teacher_gpus == 16) for work in (one, two)]
    assert [layout.teacher_copies for layout in split] == [8, 4]
    times = [step_time(work, layout, TYPICAL) for work, layout in zip((one, two), split, strict=True)]
    assert times[0].teacher == pytest.approx(times[1].teacher)
    alone = [step_time(work, next(layouts(work, GPUS["b200"], 1, 1)), TYPICAL).teacher for work in (one, two)]
    assert alone[0] == pytest.approx(alone[1])
    said = report(make_plan(two, GPUS["h100"], 4, 8))
    assert "teacher 'code' Qwen/Qwen3-30B-A3B-Instruct-2507: 30.53 B" in said
    assert "16 for 2 teachers (4 copies of 2 each)" in said
    served = workload(teacher__others={"code": {"urls": ["http://gpu:8000"]}})
    with pytest.raises(PlanError, match=r"teacher\.others\.code\.urls is set"):
        make_plan(served, GPUS["h100"], 4, 8)


def test_what_would_fit_is_said() -> None:
    huge = workload(PAPER / "qwen3-30b-a3b-from-qwen3-235b-a22b-instruct-2507-iw-opd-math.toml")
    plan = make_plan(huge, GPUS["h100"], 1, 8)
    assert not plan.fits
    more = next(option for option in plan.fitting if option.startswith("--nodes"))
    nodes = int(more.split()[1])
    assert make_plan(huge, GPUS["h100"], nodes, 8).fits
    assert not any(layout.fits for count in range(2, nodes) for layout in layouts(huge, GPUS["h100"], count, 8))
    assert more in report(plan)
    assert "seconds" not in report(plan)  # no time for what does not run


def test_an_embedded_world() -> None:
    config = make_settings({"models": {"world": "clean"}})
    plan = make_plan(open_workload(config), GPUS["rtx4090"], 1, 1)
    assert plan.fits
    assert not plan.work.answer_assumed


def test_an_answer_needs_a_limit() -> None:
    with pytest.raises(PlanError, match=r"rollout\.max_tokens is empty"):
        workload(rollout__max_tokens=None)


# --- the page -------------------------------------------------------------------------------------------------------------


def test_the_page_holds_what_the_bench_prints(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    for line in bench.published_table():
        assert line in page, f"docs/plan.md lacks: {line}; run bench/plan.py --published"


def test_the_plan_agrees_with_what_was_published(bench: ModuleType) -> None:
    ratios = {what: plan(TYPICAL) / figure for what, _, _, figure, plan in bench.published()}
    assert all(0.6 < ratio < 1.4 for ratio in ratios.values()), ratios
    assert math.exp(sum(map(math.log, ratios.values())) / len(ratios)) == pytest.approx(1.0, abs=0.1)


def test_the_page_lists_the_gpus() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    for gpu in GPUS.values():
        numbers = (gpu.memory / 1e9, gpu.flops / 1e12, gpu.bandwidth / 1e12, gpu.link / 1e9, gpu.network / 1e9)
        figures = " | ".join(f"{number:g}" for number in numbers)
        assert f"| `{gpu.name}` | {gpu.title} | {figures} |" in page

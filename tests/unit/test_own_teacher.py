"""The student as its own teacher: what is refused, the average, and what the memory model counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.adapters import add_adapter
from iwopd.algo.averages import move_average
from iwopd.cluster.plan import GPUS, open_workload
from iwopd.cluster.plan.layout import layouts
from iwopd.config import Config, ConfigError, make_config
from iwopd.train.average import Average
from iwopd.train.loading import reference_weights
from iwopd.train.memory import GB, ModelShape, RunShape
from iwopd.train.teachers import check_teacher_device, scores_early
from models import make_model

HINT = {"user": "{prompt} {answer}"}
LORA = {"rank": 4}
DIVERGENCE = {"objective": "divergence"}


def settings(source: str, teacher: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    models = {"student": "org/student", **more.pop("models", {})}
    asked = HINT if teacher is None else teacher
    return {"models": models, "data": {"prompts": "p.jsonl"}, "teacher": {"source": source, **asked}, **more}


def config(source: str, teacher: dict[str, Any] | None = None, **more: Any) -> Config:
    return make_config(settings(source, teacher, **more))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (settings("base"), "teacher.source = 'base' .* lora.rank is 0.*: set lora.rank"),
    (settings("live", {}), "'live' has the student's weights and sees its prompt, so the gap is 0 everywhere: show it more"),
    (settings("ema", {}), "'ema' begins with the student's log-probs.*gap stays 0: .*teacher.user.*or add a reward"),
    (settings("live", {"chat_template_kwargs": {"enable_thinking": False}}), "so the gap is 0 everywhere: show it more"),
    (settings("ema", {"chat_template_kwargs": {"enable_thinking": False}}), "so the gap stays 0"),
    (settings("live", {**HINT, "tokenizer": "org/other"}), "teacher.tokenizer is 'org/other', but teacher.source = 'live'"),
    (settings("base", {}, lora=LORA), "'base' begins with the student's log-probs"),
    (settings("live", models={"teacher": "org/teacher"}), "models.teacher is 'org/teacher', but teacher.source = 'live'"),
    (settings("ema", models={"teacher_device": "cpu"}), "models.teacher_device is 'cpu'.*its device is ema.device"),
    (settings("live", models={"teacher_dtype": "bfloat16"}), "models.teacher_dtype is 'bfloat16'.*leave one"),
    (settings("live", {**HINT, "urls": ["http://a:1"]}), r"teacher.urls is \['http://a:1'\], but teacher.source"),
    (settings("ema", lora=LORA, ema={"device": "cpu"}), "ema.device is 'cpu', but with lora.rank = 4 only the adapter"),
    (
        settings("ema", ema={"device": "cpu"}, models={"attention": "flash_attention_2"}),
        "ema.device is 'cpu', where models",
    ),
    (settings("ema", ema={"device": "gpu9"}), "ema.device: is no device: write cpu"),
    (settings("ema", ema={"decay": 1.5}), "ema.decay: must be at most 1"),
    (settings("live", rollout={"overlap": True}), "rollout.overlap .* teacher.source = 'live' is the same model"),
    (settings("base", lora=LORA, rollout={"overlap": True}), "rollout.overlap .* teacher.source = 'base' is the same model"),
    (settings("live", method=DIVERGENCE, optim={"mini_batches": 2}), "output matrix changes in each of a step's 2 updates"),
    (settings("ema", method=DIVERGENCE, optim={"ppo_epochs": 3}), "output matrix changes in each of a step's 3 updates"),
    (settings("live", method=DIVERGENCE, optim={"shard": True}), "optim.shard gives the student's weights back"),
    (settings("base", lora=LORA, method=DIVERGENCE, optim={"shard": True}), "optim.shard gives the student's weights back"),
    (settings("ema", lora=LORA, method=DIVERGENCE, optim={"shard": True}), "optim.shard gives the student's weights back"),
    (settings("own"), "teacher.source: must be one of 'model', 'base', 'live' or 'ema'"),
    (settings("live", reference={"source": "base"}), "reference.source = 'base' .* lora.rank is 0"),
    (settings("live", reference={"source": "ema"}, models={"reference": "r"}), "leave models.reference out"),
    ({"models": {"student": "s"}, "data": {"prompts": "p"}}, "both models.student and models.teacher .or teacher.source"),
]


@pytest.mark.parametrize(("tree", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_work_is_refused_before_anything_is_loaded(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tree)


def test_what_can_work_is_taken() -> None:
    reward = {"checker": "math"}
    assert config("base", {}, lora=LORA, reward=reward, rollout={"samples": 2}).teacher.is_student  # a leash for a reward
    assert config("ema", {}, rollout={"mix": {"share": 0.5}}).teacher.is_student  # and for answers of others
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    assert config("live", on).teacher.is_student  # a template with a thinking mode shows another prompt
    assert config("live", lora=LORA, method=DIVERGENCE, optim={"mini_batches": 2}).lora.rank  # the matrix is frozen
    assert config("ema", method=DIVERGENCE, optim={"shard": True}).keeps_average
    assert config("live", method={**DIVERGENCE, "support": "top-k"}, optim={"mini_batches": 2}).teacher.is_student
    assert not make_config({"models": {"world": "clean"}}).keeps_average
    served = {"others": {"code": {"urls": ["http://a:1"]}}, **HINT}
    assert [scores_early(config(source, served)) for source in ("live", "ema")] == [False, True]


def test_the_reference_has_the_same_words() -> None:
    exopd = {"advantage": "exopd"}
    assert reference_weights(config("live")) is None
    assert reference_weights(config("live", method=exopd)) == "model"
    assert reference_weights(config("live", method=exopd, lora=LORA)) == "base"
    assert reference_weights(config("live", method=exopd, lora=LORA, models={"reference": "org/student"})) == "base"
    assert reference_weights(config("live", method=exopd, lora=LORA, models={"reference": "org/other"})) == "model"
    chosen = config("live", method=exopd, reference={"source": "ema"})
    assert (reference_weights(chosen), chosen.keeps_average) == ("ema", True)
    assert not config("live", reference={"source": "ema"}).keeps_average  # the method needs no reference


def test_processes_do_not_share_a_device_for_their_averages() -> None:
    chosen = config("ema", ema={"device": "cuda:1"})
    check_teacher_device(chosen, 1)
    with pytest.raises(ConfigError, match=r"ema\.device = 'cuda:1' with 2 processes"):
        check_teacher_device(chosen, 2)


# --- the average ----------------------------------------------------------------------------------------------------------


def test_the_formula() -> None:
    average, weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.ones(5, 3)
    expected = 0.9 * average.double() + 0.1 * weights.double()
    move_average(average, weights, 0.9)
    torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
    for decay, end in ((0.0, weights), (1.0, average.clone())):
        moved = average.clone()
        move_average(moved, weights, decay)
        assert moved.equal(end)
    same = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    kept = same.clone()
    move_average(same, kept, 0.993)
    assert same.equal(kept)  # to the last bit
    with pytest.raises(ValueError, match="decay must lie in"):
        move_average(same, kept, 1.01)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_it_has_one_copy_of_what_is_trained(kind: str) -> None:
    model = make_model(kind)
    average = Average(model, 0.5)
    names = dict(model.named_parameters())
    assert average.nbytes == sum(one.nbytes for one in names.values())
    own = {one.data_ptr() for one in average.model.parameters()}
    assert not own & {one.data_ptr() for one in model.parameters()}
    assert sum(one.nbytes for one in average.model.parameters()) == average.nbytes  # tied weights stay tied
    assert not any(one.requires_grad for one in average.model.parameters())
    assert not average.model.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = {name: one.clone() for name, one in average.tensors.items()}
    average.follow(model.parameters())
    for name, one in dict(average.model.named_parameters()).items():
        torch.testing.assert_close(one, before[name] + 0.5)


def test_of_an_adapter_it_has_the_adapter_alone() -> None:
    model = make_model("qwen3")
    add_adapter(model, 2, 4.0, ["all-linear"])
    average = Average(model, 0.5)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert average.tensors.keys() == trained.keys()
    shared = {id(one) for one in model.parameters()} & {id(one) for one in average.model.parameters()}
    assert len(shared) == sum(1 for one in model.parameters() if not one.requires_grad)
    assert all(one.requires_grad for one in trained.values())  # the student's still learn


def test_half_precision_is_averaged_in_float32(tmp_path: Path) -> None:
    """A step of the average is far smaller than the last bit of a bfloat16 weight; a thousand of them are not."""
    model = make_model("qwen3").to(torch.bfloat16)
    average = Average(model, 0.999)
    start = next(iter(average.tensors.values())).clone()
    masters = [one.detach().float() + 0.1 for one in model.parameters()]
    for _ in range(1000):
        average.follow(masters)
    moved = next(iter(average.tensors.values())) - start
    assert moved.mean() == pytest.approx(0.1 * (1 - 0.999**1000), rel=1e-3)
    scored = next(average.model.parameters())
    assert scored.dtype == torch.bfloat16
    assert scored.equal(next(iter(average.tensors.values())).bfloat16())
    average.write(tmp_path)
    other = Average(model, 0.999)
    other.load(tmp_path)
    assert all(one.equal(other.tensors[name]) for name, one in average.tensors.items())
    assert next(other.model.parameters()).equal(scored)


# --- memory ---------------------------------------------------------------------------------------------------------------


def shape(chosen: Config) -> RunShape:
    student = ModelShape.of(make_model("qwen3").config)
    return RunShape(config=chosen, student=student, teachers={}, reference=None, longest=32)


def test_the_memory_model_counts_no_copy_for_live_and_base_and_one_for_ema() -> None:
    size = 4 * ModelShape.of(make_model("qwen3").config).count.total
    states = {
        name: shape(chosen).on_one_device(gpus=0)
        for name, chosen in {
            "live": config("live"),
            "ema": config("ema"),
            "base": config("base", lora=LORA),
            "adapter": config("ema", lora=LORA),
            "half": config("ema", models={"dtype": "bfloat16"}),
        }.items()
    }
    assert states["live"].state["teachers"] == states["base"].state["teachers"] == 0
    assert "average" not in states["live"].state
    assert "average" not in states["base"].state
    assert states["ema"].state["average"] == size
    assert states["adapter"].state["average"] == states["adapter"].state["adam"] / 2
    assert states["half"].state["average"] == 1.5 * size  # in float32, and rounded to score
    assert states["ema"].checkpoint - states["live"].checkpoint == size
    away = shape(config("ema", ema={"device": "cpu"}))
    assert "average" not in away.on_one_device(gpus=1, memory=8 * GB).state
    assert away.in_main_memory(1) > size
    horizon = {"rollout": {"max_tokens": 16, "horizon": {"type": "drift"}}}
    assert shape(config("live", **horizon)).on_one_device(gpus=0).stages["rollouts"]["teacher's cache"] > 0


def test_a_plan_counts_the_second_reading(tmp_path: Path) -> None:
    make_model("qwen3").config.save_pretrained(tmp_path / "student")
    chosen = config("live", models={"student": str(tmp_path / "student")}, rollout={"max_tokens": 64})
    work = open_workload(chosen)
    assert (work.teachers, list(work.scoring)) == ({}, ["teacher"])
    assert [layout.trainer for layout in layouts(work, GPUS["h100"], 1, 1)] == ["local"]
    with pytest.raises(Exception, match=r"teacher\.source is 'live', and on verl the teacher is a model of its own"):
        list(layouts(work, GPUS["h100"], 1, 8))

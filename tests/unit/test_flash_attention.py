"""FlashAttention with float32 weights and bf16 autocast, on a stand-in for its kernels (`flash_stand_in`: no GPU here)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash_stand_in import flash_attention, with_flash
from iwopd.algo.objectives import make_objective
from iwopd.config import Config, ConfigError, Optim, make_config
from iwopd.packing import ATTENTION, attention_obstacle
from iwopd.teacher.local import LocalScorer
from iwopd.train.assembly import assemble, check_heads
from iwopd.train.attention import flash_refuses
from iwopd.train.doctor import examine_recipe, own_logprobs
from iwopd.train.doctor.echo import agreement
from iwopd.train.learner import Learner
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import make_model

__all__ = ["flash_attention"]
pytestmark = pytest.mark.usefixtures("flash_attention")


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 9), (5, 4), (2, 14)]
    made = []
    for number, (prompt, length) in enumerate(lengths):
        ids = torch.randint(2, 21, (prompt + length,), generator=generator)
        made.append(Rollout(Prompt(str(number), tuple(ids[:prompt].tolist())), ids[prompt:], torch.zeros(length), "length"))
    return made


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_heads_packing_and_scores_under_the_runs_autocast(kind: str) -> None:
    """Float32 weights: outside autocast the kernel refuses, inside it computes, packed."""
    items = rollouts()
    scorer = LocalScorer(with_flash(make_model(kind).eval()), vocab_size=21, autocast=bf16)
    checked = check_heads({"student": scorer}, [item.prompt for item in items])["student"]
    assert checked.fused
    assert checked.packing_obstacle is None
    assert scorer.half
    exact = LocalScorer(make_model(kind).eval(), vocab_size=21).score(items)
    agree, largest, _ = agreement(scorer.score(items), exact, half=True)
    assert agree
    assert largest > 1e-4  # the kernel did run in bfloat16


def test_the_doctors_own_pass_runs_in_the_models_context() -> None:
    items, model = rollouts(), with_flash(make_model("qwen3").eval())
    own = own_logprobs(model, items, 1.0, 21, bf16)
    assert agreement(LocalScorer(model, vocab_size=21, autocast=bf16).score(items), own, half=True)[0]
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        own_logprobs(model, items, 1.0, 21)


def test_an_update_is_that_of_the_models_usual_attention() -> None:
    """Packed, under autocast: gradients within bfloat16's rounding."""
    items, moments = rollouts(), []
    for prepare in (with_flash, lambda model: model):
        scorer = LocalScorer(prepare(make_model("qwen3")), vocab_size=21, autocast=bf16)
        objective = make_objective({"weights": "cumulative-share"})
        learner = Learner(scorer.lm, Optim(lr=1e-9, grad_clip=1e9), objective, Ranks())
        old = scorer.score(items)
        batch = TokenBatch.collate([ScoredRollout(item, lp, lp - 1.0) for item, lp in zip(items, old, strict=True)])
        update = learner.update(batch, loss_columns(objective, batch, evidence_of(batch)), seed=0, step=1)
        assert (update.updates, update.padding_waste) == (1, 0.0)
        moments.append(torch.cat([learner.optimizer.state[p]["exp_avg"].flatten() for p in learner.weights.parameters]))
    assert float((moments[0] - moments[1]).norm() / moments[1].norm()) < 0.05


def test_without_autocast_the_reason_is_the_kernels() -> None:
    lm = LocalScorer(with_flash(make_model("qwen3").eval()), vocab_size=21).lm
    assert "only support fp16 and bf16" in str(lm.packing_obstacle)


@pytest.mark.parametrize(
    ("attention", "device", "words"),
    [
        ("flash_attention_2", "cuda", None),
        ("flash_attention_3", "cuda", None),
        ("sdpa", "cpu", None),
        (ATTENTION, "cpu", None),
        ("sdpa", "cuda", "load the model with flash_attention_2"),
        ("eager", "cuda", "its attention is 'eager'"),
        (None, "cpu", "its attention is None"),
    ],
)
def test_which_attention_keeps_packed_sequences_apart(attention: str | None, device: str, words: str | None) -> None:
    found = attention_obstacle(attention, device)
    assert found is None if words is None else words in str(found)


def recipe(**settings: Any) -> Config:
    models = {"student": "a", "teacher": "b", "attention": "flash_attention_2", **settings.pop("models", {})}
    return make_config({"models": models, "data": {"prompts": "prompts.jsonl"}, "rollout": {"max_tokens": 8}, **settings})


@pytest.mark.parametrize(
    ("settings", "remedies"),
    [
        ({}, ["precision = 'bf16'", "models.teacher_dtype = 'bfloat16'"]),
        ({"precision": "bf16"}, ["models.teacher_dtype = 'bfloat16'"]),
        ({"precision": "bf16", "models": {"teacher_dtype": "bfloat16"}}, []),
        ({"models": {"dtype": "bfloat16"}}, []),
        ({"models": {"attention": "sdpa"}}, []),
        ({"precision": "bf16", "teacher": {"urls": ["http://localhost:8000"]}}, []),
    ],
)
def test_float32_models_are_refused_with_the_remedy(settings: dict[str, Any], remedies: list[str]) -> None:
    found = list(flash_refuses(recipe(**settings)))
    assert len(found) == len(remedies)
    for refused, remedy in zip(found, remedies, strict=True):
        assert "in float32" in refused.message
        assert remedy in refused.remedy


def test_doctor_and_trainer_say_so_before_a_model_is_loaded(tmp_path: Path) -> None:
    config = recipe(precision="bf16")
    line = next(line for line in examine_recipe(config, tmp_path) if line.check == "attention")
    assert line.level == "fail"
    assert "models.teacher_dtype = 'bfloat16'" in line.text()
    with pytest.raises(ConfigError, match=r"the teacher is loaded in float32 .*: set models.teacher_dtype = 'bfloat16'"):
        assemble(config, print)

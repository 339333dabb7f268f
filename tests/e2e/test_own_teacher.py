"""The student as its own teacher in real runs: exact scores, one average that resumes bit for bit, no copies, and it learns."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from iwopd.config import ConfigError, make_config
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.prompted import PromptedScorer
from iwopd.tiny import build_tokenizer
from iwopd.train.assembly import assemble
from iwopd.train.loop import take_step
from iwopd.train.parts import Parts
from iwopd.train.run import run_training
from iwopd.train.scoring import loss_columns, score_step, write_rollouts
from models import make_model

LORA = {"lora": {"rank": 2}}
EMA = {"ema": {"decay": 0.5}}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    make_model("qwen3", seed=1).save_pretrained(folder / "student")
    build_tokenizer().save_pretrained(folder / "student")
    sums = [(i % 10, i // 10) for i in range(24)]
    lines = [json.dumps({"id": f"p{a}{b}", "prompt": f"{a}+{b}", "answer": str((a + b) % 10)}) for a, b in sums]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def settings(folder: Path, source: str, **more: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "steps": 4,
        "threads": 1,
        "models": {"student": str(folder / "student")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "teacher": {"source": source, "user": "{prompt}={answer}"},
        "rollout": {"prompts_per_step": 8, "max_tokens": 12},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 2},
        "tracking": {"console": "off"},
    }
    return {name: {**tree.get(name, {}), **more[name]} if name in more else tree[name] for name in {**tree, **more}}


@contextmanager
def opened(tree: dict[str, Any]) -> Iterator[tuple[Any, Parts]]:
    config = make_config(tree)
    try:
        with assemble(config, print) as parts:
            yield config, parts
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def inside(parts: Parts) -> Any:
    """The teacher without its prompt."""
    assert isinstance(parts.teacher_scorer, PromptedScorer)
    return parts.teacher_scorer.scorer


def own_gap(parts: Parts, rollouts: Any) -> Tensor:
    """Of the teacher to the student on the student's prompts."""
    return torch.cat(inside(parts).score(rollouts)) - torch.cat(parts.student_scorer.score(rollouts))


@pytest.mark.parametrize(
    ("source", "more"),
    [("live", {}), ("ema", EMA), ("base", LORA), ("ema", {**LORA, **EMA}), ("ema", {**EMA, "precision": "bf16"})],
)
def test_an_unmoved_student_has_no_gap_to_itself(student: Path, source: str, more: dict[str, Any], tmp_path: Path) -> None:
    """To the last bit; and after a step only the present weights still have none."""
    tree = {**settings(student, source), **more}
    with opened(tree) as (config, parts):
        rollouts = write_rollouts(config, parts, 1).rollouts
        assert own_gap(parts, rollouts).eq(0).all()
        hinted = torch.cat(parts.teacher_scorer.score(rollouts)) - torch.cat(parts.student_scorer.score(rollouts))
        assert hinted.abs().max() > 1e-3  # the prompt makes the difference
        before = torch.cat(inside(parts).score(rollouts))
        take_step(config, parts, RunDirectory(tmp_path), 1)
        gap, after = own_gap(parts, rollouts), torch.cat(inside(parts).score(rollouts))
        assert gap.eq(0).all() == (source == "live")
        assert after.equal(before) == (source == "base")


def test_the_average_follows_every_update_that_was_taken_and_no_other(student: Path, tmp_path: Path) -> None:
    tree = settings(student, "ema", ema={"decay": 0.7}, optim={"mini_batches": 2, "ppo_epochs": 2})
    with opened(tree) as (config, parts):
        learner, run = parts.learner, RunDirectory(tmp_path)
        assert learner.average is not None
        expected = {name: one.double() for name, one in learner.average.tensors.items()}
        seen: list[int] = []

        def note(*_: Any) -> None:
            seen.append(1)
            for name, one in parts.student.named_parameters():
                expected[name] = 0.7 * expected[name] + 0.3 * one.detach().double()

        learner.optimizer.register_step_post_hook(note)
        take_step(config, parts, run, 1)
        assert len(seen) == 4
        for name, one in learner.average.tensors.items():
            torch.testing.assert_close(one.double(), expected[name], rtol=1e-5, atol=1e-6)
        kept = {name: one.clone() for name, one in learner.average.tensors.items()}
        learner.weights.gradient_norm = lambda: torch.tensor(math.nan)  # type: ignore[method-assign]
        assert take_step(config, parts, run, 2).metrics["update/skipped"] == 4
        assert all(one.equal(kept[name]) for name, one in learner.average.tensors.items())


@pytest.mark.parametrize("more", [EMA, {**EMA, **LORA}], ids=["whole", "adapter"])
def test_a_resumed_run_has_the_same_average_bit_for_bit(student: Path, more: dict[str, Any], tmp_path: Path) -> None:
    tree = {**settings(student, "ema"), **more}
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for number, count in enumerate(steps):
            run_training(make_config({**tree, "steps": count}), tmp_path / name, resume=number > 0, doctor=False)
    weights = "adapter_model" if "lora" in more else "model"
    for file in ("average.safetensors", f"model/{weights}.safetensors"):
        one, other = (load_file(tmp_path / name / "checkpoints" / "step-000004" / file) for name in ("whole", "parts"))
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)
    early = load_file(tmp_path / "whole" / "checkpoints" / "step-000002" / "average.safetensors")
    late = load_file(tmp_path / "whole" / "checkpoints" / "step-000004" / "average.safetensors")
    assert not all(early[name].equal(late[name]) for name in late)
    manifest = json.loads((tmp_path / "whole" / "checkpoints" / "step-000004" / "manifest.json").read_text())
    assert "average.safetensors" in manifest["files"]


def test_a_checkpoint_without_an_average_begins_one(student: Path, tmp_path: Path) -> None:
    run_training(make_config({**settings(student, "live"), "steps": 2}), tmp_path / "run", doctor=False)
    assert not (tmp_path / "run" / "checkpoints" / "step-000002" / "average.safetensors").exists()
    changed = make_config({**settings(student, "ema", ema={"decay": 0.75}), "steps": 3})
    run_training(changed, tmp_path / "run", resume=True, allow_changes=True, doctor=False)
    folders = [tmp_path / "run" / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in folders)
    for name, one in load_file(folders[1] / "average.safetensors").items():
        torch.testing.assert_close(one, 0.75 * before[name] + 0.25 * after[name])


@pytest.mark.parametrize("source", ["live", "ema"])
def test_a_prompt_that_shows_nothing_more_is_refused(student: Path, source: str) -> None:
    tree = settings(student, source, teacher={"user": "{prompt}"})
    with pytest.raises(ConfigError, match="makes the student's own prompt of all 24, so the gap is 0"), opened(tree):
        pass


@pytest.mark.parametrize(("source", "more"), [("live", {}), ("base", LORA), ("live", LORA), ("ema", {**EMA, **LORA})])
def test_whole_distributions_are_those_of_the_teacher_that_scored(student: Path, source: str, more: dict[str, Any]) -> None:
    """The loss is the KL of both distributions, written out; with an adapter also where its weights have moved."""
    method = {"objective": "divergence", "weights": "uniform", "divergence": "reverse-kl"}
    with opened({**settings(student, source, method=method), **more}) as (config, parts):
        if "lora" in more:
            with torch.no_grad():
                for name, parameter in parts.student.named_parameters():
                    if "lora_B" in name:
                        parameter.add_(0.2)
        written = write_rollouts(config, parts, 1)
        scored = score_step(config, parts, written, 1)
        total, tokens = 0.0, 0
        assert isinstance(parts.teacher_scorer, PromptedScorer)
        for rollout in written.rollouts:
            own = _logits(parts.student_scorer.lm, rollout.prompt.token_ids, rollout.response_ids)
            other = _logits(inside(parts).lm, parts.teacher_scorer.seen(rollout.prompt).token_ids, rollout.response_ids)
            total += float((own.exp() * (own - other)).sum())
            tokens += len(rollout)
        columns = loss_columns(parts.objective, scored.batch, scored.evidence)
        update = parts.learner.update(scored.batch, columns, seed=0, step=1, forward=scored.forward)
        assert update.loss == pytest.approx(total / tokens, rel=1e-4)


def test_states_that_only_the_weights_need_do_not_reach_the_loss(student: Path, tmp_path: Path) -> None:
    """A KL over all ids is made when the answers are scored; the update reads nothing of the teacher again."""
    with opened(settings(student, "live", method={"weights": "tip"})) as (config, parts):
        assert parts.objective.needs_whole_kl
        assert parts.learner.loss.teacher is None
        assert take_step(config, parts, RunDirectory(tmp_path), 1).loss != 0


@torch.no_grad()
def _logits(lm: Any, prompt: Any, answer: Tensor) -> Tensor:
    """Log-probs [T, V] of whole distributions, by the model's own forward pass."""
    ids = torch.cat([torch.tensor(prompt), answer])
    with lm.autocast():
        logits = lm.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize(("source", "more"), [("live", {}), ("base", LORA), ("ema", EMA)])
def test_it_follows_answers_while_they_are_written(student: Path, source: str, more: dict[str, Any], tmp_path: Path) -> None:
    """A drift horizon: scores in pieces are those of whole answers, of the weights before the update."""
    rollout = {"horizon": {"type": "drift", "block": 2, "threshold": 0.9}}
    with opened({**settings(student, source, rollout=rollout), **more}) as (config, parts):
        written = write_rollouts(config, parts, 1)
        assert any(one.stop_reason == "horizon" for one in written.rollouts)
        pieces = torch.cat([one.logprobs for one in written.teacher_scores(written.rollouts)])
        torch.testing.assert_close(pieces, torch.cat(parts.teacher_scorer.score(written.rollouts)), rtol=1e-4, atol=1e-4)
        take_step(config, parts, RunDirectory(tmp_path), 2)


# --- memory ---------------------------------------------------------------------------------------------------------------


def live_storages() -> dict[int, int]:
    """Bytes of everything that any tensor of this process holds, by address."""
    gc.collect()
    # By `type`: isinstance would ask proxies for their class, and some of them warn.
    tensors: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type == "cpu"]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


STRAY = 64
"""Bytes of scalars that libraries make once, when they are first used."""


def added(tree: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of all tensors that a run brings, of what it trains, and of the model's buffers."""
    before = live_storages()
    with opened(tree) as (_, parts):
        now = live_storages()
        trained = sum(one.nbytes for one in parts.student.parameters() if one.requires_grad)
        buffers = sum(one.nbytes for one in parts.student.buffers())
        return sum(size for place, size in now.items() if place not in before), trained, buffers


def test_no_copy_of_the_weights_for_live_and_base_and_one_of_the_trained_for_ema(student: Path) -> None:
    model = settings(student, "model", models={"teacher": str(student / "student")})
    (teacher, whole, buffers), (live, _, _), (ema, _, _) = (
        added(tree) for tree in (model, settings(student, "live"), settings(student, "ema"))
    )
    assert (teacher - live, ema - live) == pytest.approx((whole + buffers, whole + buffers), abs=STRAY)
    (own, adapter, _), (base, _, _), (average, _, _) = (
        added({**settings(student, source), **LORA}) for source in ("live", "base", "ema")
    )
    assert adapter < whole / 2
    assert (own - base, average - base) == pytest.approx((0, adapter + buffers), abs=STRAY)


# --- learning -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("self_teacher", Path(__file__).parents[2] / "bench" / "self_teacher.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["self_teacher"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_privileged_self_distillation_learns(bench: ModuleType, tmp_path: Path) -> None:
    """Shown the answer the model solves what it does not solve by itself, and teaches itself to."""
    torch.set_num_threads(1)
    model = bench.pretrained(0)
    plain, hinted = bench.accuracy(model), bench.accuracy(model, hinted=True)
    assert hinted > 0.8
    assert plain < 0.4
    assert bench.distilled(model, "live", 0, 40, tmp_path) > plain + 0.15  # 0.19 to 0.44 was seen

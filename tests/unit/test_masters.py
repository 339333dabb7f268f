"""A student in half precision trains like one in float32: its float32 masters move, are kept, and are summed up in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from iwopd.adapters import add_adapter
from iwopd.algo.objectives import make_objective
from iwopd.config import ConfigError, Optim, make_config
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.checkpoint import CheckpointError, CheckpointStore
from iwopd.train.learner import Learner
from iwopd.train.loading import check_trainable
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import make_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from a second one, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Training:
    """Updates on the same rollouts: the divergence to a teacher falls."""

    def __init__(self, dtype: torch.dtype, *, lora: bool = False, **optim: Any) -> None:
        self.model = make_model("qwen3").to(dtype)
        if lora:
            add_adapter(self.model, 2, 32.0, ["all-linear"])
        lm = ResponseModel(self.model, vocab_size=21)
        self.objective = make_objective({"objective": "divergence"})
        self.teacher = LocalScorer(make_model("llama", seed=5), vocab_size=21)
        self.learner = Learner(lm, Optim(token_budget=40, **optim), self.objective, Ranks(), Distributions.of(self.teacher))
        self.step = 0

    def updates(self, count: int) -> list[float]:
        generator = torch.Generator().manual_seed(3)
        items = []
        for number in range(6):
            prompt = Prompt(f"p{number}", tuple(torch.randint(2, 21, (3,), generator=generator).tolist()))
            items.append(Rollout(prompt, torch.randint(1, 21, (12,), generator=generator), torch.zeros(12), "length"))
        losses = []
        for _ in range(count):
            old = LocalScorer(self.model, vocab_size=21).score(items)
            scored = zip(items, old, self.teacher.score(items), strict=True)
            batch = TokenBatch.collate([ScoredRollout(*one) for one in scored])
            self.step += 1
            update = self.learner.update(batch, loss_columns(self.objective, batch, evidence_of(batch)), seed=0, step=self.step)
            assert update.updates == 1
            losses.append(update.loss)
        return losses

    @property
    def trained(self) -> list[Tensor]:
        """What the optimizer works on."""
        return [one.detach() for group in self.learner.optimizer.param_groups for one in group["params"]]

    def save(self, folder: Path) -> None:
        CheckpointStore(folder).save(self.step, model=self.model, optimizer=self.learner.optimizer_state(), state={})

    def load(self, folder: Path) -> None:
        checkpoint = CheckpointStore(folder).latest()
        assert checkpoint is not None
        checkpoint.load_model_weights(self.model)
        self.learner.weights.follow_student()
        checkpoint.load_optimizer(self.learner.optimizer, self.learner.weights.masters)
        self.step = checkpoint.step


def test_every_weight_moves_however_small_the_step() -> None:
    training = Training(torch.bfloat16, lr=1e-5)
    start = [one.clone() for one in training.trained]
    training.updates(10)
    moved = sum(int((one != before).sum()) for one, before in zip(training.trained, start, strict=True))
    assert moved / sum(one.numel() for one in start) == 1.0  # of weights in bfloat16: 2 %


def test_it_learns_as_in_float32() -> None:
    """Steps of 1e-4 are lost on most weights in bfloat16."""
    whole, half = Training(torch.float32, lr=1e-4).updates(25), Training(torch.bfloat16, lr=1e-4).updates(25)
    learnt = whole[0] - whole[-1]
    assert learnt > 0.05
    assert half[0] - half[-1] == pytest.approx(learnt, rel=0.1)


def test_the_student_is_its_rounded_masters_and_gradients_are_in_float32() -> None:
    training = Training(torch.bfloat16, lr=1e-3)
    seen: list[Tensor | None] = []
    training.learner.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(one.grad for one in training.learner.weights.parameters)
    )
    training.updates(2)
    assert len(seen) == 2 * len(training.trained)
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in seen)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    for parameter, master in zip(training.model.parameters(), training.trained, strict=True):
        assert torch.equal(parameter, master.bfloat16())
    moments = [value for state in training.learner.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in moments} == {torch.float32}


def test_resuming_is_exact(tmp_path: Path) -> None:
    whole, first, second = (Training(torch.bfloat16, lr=1e-4) for _ in range(3))
    losses = whole.updates(4)
    first.updates(2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.updates(2) == losses[2:]
    assert all(torch.equal(one, other) for one, other in zip(whole.trained, second.trained, strict=True))
    exported = load_file(tmp_path / "step-000002" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


def test_a_checkpoint_without_masters_is_refused(tmp_path: Path) -> None:
    """As a version without masters would write it, whole, and of another precision."""
    training = Training(torch.bfloat16)
    training.updates(1)
    folder = tmp_path / "plain"
    CheckpointStore(folder).save(1, model=training.model, optimizer=training.learner.optimizer, state={})
    with pytest.raises(CheckpointError, match=r"copies of 0 weights, and 24 are trained in half.*Start a new run from .*model"):
        Training(torch.bfloat16).load(folder)


def test_a_float32_checkpoint_of_a_version_without_masters_loads(tmp_path: Path) -> None:
    training, other = Training(torch.float32), Training(torch.float32)
    training.updates(1)
    training.save(tmp_path)
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    values = json.loads((found.path / "optimizer.json").read_text())
    assert values.pop("masters") == []
    (found.path / "optimizer.json").write_text(json.dumps(values))
    tensors = load_file(found.path / "optimizer.safetensors")
    assert not any(name.startswith("masters") for name in tensors)
    save_file(tensors, found.path / "optimizer.safetensors")
    found.load_model_weights(other.model)
    found.load_optimizer(other.learner.optimizer, other.learner.weights.masters)
    states = (one.learner.optimizer.state_dict()["state"] for one in (training, other))
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_an_adapter_is_trained_in_float32_without_masters() -> None:
    training = Training(torch.bfloat16, lora=True, lr=1e-5)
    start = [one.clone() for one in training.trained]
    training.updates(2)
    assert training.learner.weights.masters == {}
    assert all(one.dtype == torch.float32 for one in training.trained)
    assert any(not torch.equal(one, before) for one, before in zip(training.trained, start, strict=True))


def test_float16_is_refused_with_words() -> None:
    models = {"student": "a", "teacher": "b", "dtype": "float16"}
    config = make_config({"models": models, "data": {"prompts": "p"}, "rollout": {"max_tokens": 8}})
    with pytest.raises(ConfigError, match=r"models\.dtype = 'float16' cannot be trained here.*'bfloat16'"):
        check_trainable(config)

"""The short probe of a configured pair: the trainer's own gradients, without a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from iwopd.algo.agreement import GradientParts
from iwopd.algo.gradients import cosine
from iwopd.analysis.pair_probe import pooled_agreement, probe_pair, probe_settings
from iwopd.analysis.prediction import method_section
from iwopd.analysis.probe.alignment import AlignmentBatch, cosines
from iwopd.analysis.probe.inputs import Material
from iwopd.analysis.probe.rules import Rule
from iwopd.analysis.probe.scoring import score_tokens
from iwopd.config import make_config
from iwopd.data.prompts import PromptOrder
from iwopd.lm import ResponseModel
from iwopd.methods import METHODS
from iwopd.train.assembly import assemble
from iwopd.train.scoring import write_rollouts
from models import save_pair

NAMES = ("opd", "iw-opd-4", "survival", "prefix-30")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def material_of(config: Any) -> Material:
    """The pair's own prompts, with made-up solutions."""
    with assemble(config, lambda _: None) as parts:
        prompts = parts.order.prompts
    return Material(prompts, solutions={one.id: (5, 6, 7 + place % 3, 1) for place, one in enumerate(prompts)})


def test_cosines_are_those_of_the_probe(settings: dict[str, Any]) -> None:
    """The same rollouts, once through the learner's losses and once through `iwopd probe`'s sums of log-probs."""
    config = make_config(settings)
    material = material_of(config)
    found = probe_pair(config, batches=1, prompts=8, methods=[*NAMES, "kl", "kl-survival", "kl-gated"], material=material)
    asked = probe_settings(config, 8)
    with assemble(asked, lambda _: None) as parts:
        parts.order = PromptOrder(material.prompts, 8, config.seed)
        rollouts = write_rollouts(asked, parts, 1).rollouts
        student = ResponseModel(parts.student, vocab_size=len(parts.tokenizer))
        teacher = parts.teacher_scorer.local("teacher")["teacher"].lm
        tokens = score_tokens(student, teacher, rollouts, top_k=1)
        solutions = {one.prompt.id: torch.tensor(material.solutions[one.prompt.id]) for one in rollouts}
        rules = [Rule(name, name, method_section(name)) for name in NAMES]
        directions = {rule.key: rule.signal(tokens).advantages for rule in rules}
        expected = cosines(student, AlignmentBatch(rollouts, tokens, solutions), directions, range(8))
    assert {name: found.cosines[name].mean for name in NAMES} == pytest.approx(expected, abs=1e-4)
    assert {"kl", "kl-survival", "kl-gated"} <= found.record["cosines"].keys()
    assert found.record["prompts"] == 8


def test_the_agreement_needs_no_answers_and_changes_nothing(settings: dict[str, Any]) -> None:
    config = make_config(settings)
    one, two = (probe_pair(config, batches=3, prompts=8) for _ in range(2))
    assert one == two
    assert one.agreement.mean is not None
    assert -1 <= one.agreement.mean <= 1
    assert one.record.keys() == {"agreement", "agreement_interval", "gap", "prompts", "batches"}
    assert one.gap > 0.1


def test_settings_of_the_probe_are_the_pairs_own() -> None:
    method = {"weights": "survival"}
    rollout = {"prompts_per_step": 64, "temperature": 0.7, "horizon": {"type": "fixed", "tokens": 8}}
    optim = {"lr": 1e-3, "mini_batches": 4, "ppo_epochs": 2}
    config = make_config({"models": {"world": "clean", "lineage": 3}, "method": method, "rollout": rollout, "optim": optim})
    asked = probe_settings(config, 16)
    assert asked.models == config.models
    assert (asked.rollout.temperature, asked.rollout.prompts_per_step, asked.rollout.horizon.type) == (0.7, 16, "full")
    assert asked.method == make_config({"models": {"world": "clean"}, "method": METHODS["kl"]}).method
    assert (asked.optim.mini_batches, asked.optim.ppo_epochs) == (1, 1)


def test_batches_are_pooled_before_the_cosine() -> None:
    """Two batches whose parts are orthogonal by themselves: together they agree as their sums do."""
    first = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    second = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    found = pooled_agreement([GradientParts(first), GradientParts(second)])
    assert found.mean == pytest.approx(cosine([torch.ones(2)], [torch.ones(2)])) == pytest.approx(1.0)
    assert pooled_agreement([]).mean is None
    assert pooled_agreement([GradientParts(torch.zeros(2, 1, 2))]).mean is None

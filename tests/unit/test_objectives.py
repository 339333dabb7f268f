"""Objectives: the evidence they ask for, the signal they make of it, and the settings that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import OBJECTIVES, PolicyGradient, TokenStates, TrainingSignal, make_objective
from iwopd.config import ConfigError, make_config
from iwopd.methods import method_title
from support import RULES, random_batch


def evidence(batch: dict[str, Any], **more: Any) -> Evidence:
    return Evidence(batch["teacher_logprobs"], batch["old_logprobs"], batch["mask"], **more)


def signal(batch: dict[str, Any], section: dict[str, Any], **more: Any) -> TrainingSignal:
    return make_objective(section).signal(evidence(batch, **more))


@pytest.mark.parametrize(("name", "params"), RULES)
def test_opd_signal_is_gap_times_weights_on_supervised_tokens(name: str, params: dict[str, Any]) -> None:
    batch = random_batch([7, 3, 0])
    mask, teacher, old = batch["mask"], batch["teacher_logprobs"], batch["old_logprobs"]
    made = signal(batch, {"weights": name, "params": params}, progress=0.5)
    gap = algo.opd_advantages(teacher, old, mask)
    weights = algo.token_weights(name, gap, mask, progress=0.5, **params)
    assert torch.equal(made.gap, gap)
    assert torch.equal(made.weights, weights)
    assert torch.equal(made.advantages, gap * weights)
    assert torch.equal(made.supervised, algo.supervised_mask(name, mask, weights=weights, **params))


def test_iw_exopd_applies_the_weights_once() -> None:
    batch = random_batch([7, 3])
    mask, teacher, old, reference = (batch[k] for k in ("mask", "teacher_logprobs", "old_logprobs", "reference_logprobs"))
    section = {"advantage": "exopd", "weights": "cumulative-share"}
    weights = algo.token_weights("cumulative-share", algo.opd_advantages(teacher, old, mask), mask)
    inside = signal(batch, section, reference_logprobs=reference)
    assert torch.equal(inside.advantages, algo.exopd_advantages(teacher, old, reference, mask, 1.25, weights))
    outside = signal(batch, {**section, "weighting": "advantage"}, reference_logprobs=reference)
    assert torch.equal(outside.advantages, algo.exopd_advantages(teacher, old, reference, mask) * weights)
    plain = signal(batch, {"advantage": "exopd", "weights": "uniform"}, reference_logprobs=reference)
    assert torch.equal(plain.advantages, algo.exopd_advantages(teacher, old, reference, mask))


def test_unsupervised_tokens_get_no_advantage_under_exopd_either() -> None:
    batch = random_batch([10])
    section = {"advantage": "exopd", "weights": "prefix-only"}
    made = signal(batch, section, reference_logprobs=batch["reference_logprobs"])
    assert made.advantages[0, :3].all()
    assert not made.advantages[0, 3:].any()


@pytest.mark.parametrize(
    ("section", "needed", "not_needed"),
    [
        ({}, {"teacher_logprobs", "old_logprobs"}, {"reference_logprobs", "progress"}),
        ({"advantage": "exopd"}, {"reference_logprobs"}, {"progress"}),
        ({"kl_coef": 0.1}, {"reference_logprobs"}, {"progress"}),
        ({"weights": "curriculum"}, {"progress"}, {"reference_logprobs"}),
    ],
)
def test_an_objective_asks_for_what_it_uses_and_no_more(
    section: dict[str, Any], needed: set[str], not_needed: set[str]
) -> None:
    needs = make_objective(section).needs
    assert needed <= needs
    assert not not_needed & needs


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"weights": "ideal"}, "other rollouts"),
        ({"weights": "curriculum"}, "progress"),
        ({"weights": "prefix-only"}, "denominator"),
        ({"weights": "signed", "params": {"normalize": "mean-one"}}, "mean over the batch"),
    ],
)
def test_an_objective_says_why_it_needs_the_whole_batch(section: dict[str, Any], words: str) -> None:
    assert words in str(make_objective(section).needs_whole_batch)
    assert make_objective({"weights": "cumulative-share"}).needs_whole_batch is None


def test_the_fused_loss_and_the_one_from_logprobs_are_the_same() -> None:
    batch = random_batch([6, 4])
    objective = make_objective({"weights": "cumulative-share", "clip": 0.1})
    known = evidence(batch)
    columns = {name: values[batch["mask"]] for name, values in objective.columns(known, objective.signal(known)).items()}
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 5, generator=generator).requires_grad_()
    weight = torch.randn(13, 5, generator=generator)
    targets = torch.randint(13, (10,), generator=generator)
    fused = objective.loss(TokenStates(hidden, targets, weight), columns, 10.0)
    logprobs = algo.token_logprobs(hidden, weight, targets)
    plain = objective.logprobs_loss(logprobs, columns, 10.0)
    torch.testing.assert_close(fused.loss.double(), plain.loss.double())
    one, other = (torch.autograd.grad(item.loss, hidden, retain_graph=True)[0] for item in (fused, plain))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scale": 1.25}, r"scale is not used by objective 'policy-gradient' with advantage 'opd': .* advantage 'exopd'"),
        ({"weighting": "advantage"}, "weighting is not used by .* advantage 'opd'"),
        ({"clp": 0.2}, "no setting 'clp'; did you mean 'clip'"),
        ({"objective": "grpo"}, "unknown objective 'grpo'; choices: policy-gradient"),
        ({"advantage": "grpo"}, "unknown advantage 'grpo'"),
        ({"advantage": "exopd", "weighting": "both"}, "weighting"),
        ({"advantage": "exopd", "scale": -1.0}, "scale must be positive"),
        ({"advantage": "exopd", "scale": "big"}, "scale"),
        ({"clip": "wide"}, "clip"),
        ({"clip": -0.2}, "clip must be positive, got -0.2"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"entropy_coef": -1.0}, "entropy_coef must not be negative"),
        ({"correction_threshold": 0.0}, "correction_threshold must be positive"),
        ({"weights": "survival", "params": {"tau": 0.0}}, "tau must be positive"),
        ({"weights": "survival", "params": {"tu": 1.0}}, "did you mean 'tau'"),
        ({"weights": "survival", "params": {"tau": "x"}}, "weight rule 'survival': tau must be a number, got 'x'"),
        ({"weights": "cumulative-share", "params": {"blend": 3}}, "blend must be true or false, got 3"),
        ({"weights": "cumulative-share", "params": {"total": "half"}}, "total must be 'paper' or 'all', got 'half'"),
        ({"weights": "surviva"}, "did you mean 'survival'"),
    ],
)
def test_a_setting_that_is_wrong_or_unused_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"models": {"world": "clean"}, "method": section})


def test_evidence_that_is_missing_is_named() -> None:
    batch = random_batch([2])
    with pytest.raises(ValueError, match="advantage 'exopd' needs reference_logprobs"):
        signal(batch, {"advantage": "exopd"})
    with pytest.raises(ValueError, match="weight rule 'curriculum' needs progress"):
        signal(batch, {"weights": "curriculum"})


def test_every_objective_describes_itself() -> None:
    for kind in OBJECTIVES.values():
        assert all(getattr(kind, name) for name in ("name", "title", "formula", "source"))
        settings = kind.settings({})
        assert all(one.description for one in settings.values()), settings
    assert PolicyGradient.settings({"advantage": "exopd"})["scale"].default == 1.25


def test_a_method_without_a_name_is_called_by_what_it_is_made_of() -> None:
    assert method_title({}) == "OPD"
    assert method_title({"weights": "cumulative-share"}) == "IW-OPD"
    assert method_title({"objective": "divergence", "weights": "survival"}) == "Reverse KL, survival (ours)"
    assert method_title({"objective": "divergence", "weights": "signed"}) == "divergence signed"
    skewed = {"objective": "divergence", "divergence": "skew-forward-kl"}
    assert method_title(skewed) == "divergence uniform divergence=skew-forward-kl alpha=0.1"
    assert method_title({"advantage": "exopd", "scale": 1.5, "params": {}}) == "exopd uniform scale=1.5"
    assert method_title({"objective": "of-a-plug-in-that-is-gone", "weights": "signed"}) == "of-a-plug-in-that-is-gone signed"

"""Gradient alignment against a computation with explicit gradients, parameter by parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.drift import drift_regions
from iwopd.algo.gradients import cosine
from iwopd.analysis.probe.alignment import REGIONS, SIDES, AlignmentBatch, TokenGradients, cosines, measure_alignment
from iwopd.analysis.probe.result import Drift, Estimate
from iwopd.analysis.probe.rules import Rule, probe_rules
from iwopd.analysis.probe.scoring import Tokens
from iwopd.lm import ResponseModel
from iwopd.types import Prompt, Rollout
from models import make_model
from support import length_mask

VOCAB = 21
LENGTHS = (7, 3, 5, 1)
CORRECT = torch.tensor([1.0, 0.0, 0.0, math.nan])


@pytest.fixture(scope="module")
def lm() -> ResponseModel:
    model = make_model("qwen3", hidden=16, layers=1).double().eval()
    return ResponseModel(model, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def batch() -> AlignmentBatch:
    torch.manual_seed(3)
    rollouts, solutions = [], {}
    for number, length in enumerate(LENGTHS):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, VOCAB, (3 + number,)).tolist()))
        ids = torch.randint(2, VOCAB, (length,))
        rollouts.append(Rollout(prompt, ids, torch.zeros(length), "length"))
        solutions[prompt.id] = torch.randint(1, VOCAB, (4 + number,))
    mask = length_mask(LENGTHS)
    old = torch.where(mask, -torch.rand(mask.shape, dtype=torch.float64), 0.0)
    teacher = torch.where(mask, -4 * torch.rand(mask.shape, dtype=torch.float64), 0.0)
    numbers = {
        name: torch.where(mask, torch.rand(mask.shape, dtype=torch.float64), 0.0) for name in ("kl", "shared", "same_first")
    }
    entropies = {(f"{name}_entropy", 0): torch.rand(mask.shape, dtype=torch.float64) for name in ("student", "teacher")}
    more = {**entropies, ("top_overlap", 4): (4 * torch.rand(mask.shape, dtype=torch.float64)).floor() / 4}
    tokens = Tokens(mask, list(range(4)), old, teacher, teacher - old, more=more, correct=CORRECT, **numbers)
    return AlignmentBatch(rollouts, tokens, solutions)


def token_gradients(model: Any, prompts: list[Tensor], responses: list[Tensor]) -> Tensor:
    """[N, parameters]: the gradient of every single token's log-prob, a backward pass each."""
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        for place in range(len(response)):
            ids = torch.cat([prompt, response[:place]])
            logprob = model(input_ids=ids[None]).logits[0, -1].log_softmax(-1)[response[place]]
            gradient = torch.autograd.grad(logprob, list(model.parameters()))
            rows.append(torch.cat([part.flatten() for part in gradient]))
    return torch.stack(rows)


def explicit_cosines(
    lm: ResponseModel, batch: AlignmentBatch, wanted: dict[str, Tensor], rows: list[int] | None = None
) -> dict[str, float]:
    """Of coefficients [B, T] on all rollouts, or on some of them with the solutions of their prompts."""
    rows = list(range(len(LENGTHS))) if rows is None else rows
    rollouts = [batch.rollouts[row] for row in rows]
    prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in rollouts]
    target = token_gradients(lm.model, prompts, [batch.solutions[rollout.prompt.id] for rollout in rollouts]).sum(0)
    tokens = token_gradients(lm.model, prompts, [rollout.response_ids for rollout in rollouts])
    mask = batch.tokens.mask[rows]
    found = {}
    for key, coefficients in wanted.items():
        update = coefficients[rows][mask] @ tokens
        found[key] = float(torch.nn.functional.cosine_similarity(update, target, dim=0))
    return found


def directions(batch: AlignmentBatch, rules: list[Rule], threshold: float) -> dict[str, Tensor]:
    """Coefficients [B, T] of rules that need no more than the gap, and of the regions."""
    gap, mask = batch.tokens.gap, batch.tokens.mask
    before, at, after = drift_regions(gap, mask, threshold)
    wanted = {rule.key: gap * algo.token_weights(rule.weights, gap, mask, progress=0.0, **rule.params) for rule in rules}
    for key, region in (("before", before), ("at", at), ("until", before | at), ("after", after)):
        wanted[key] = gap * region
    return wanted


def share() -> Drift:
    half = Estimate(mean=0.5)
    return Drift(threshold=1.0, rollouts=half, position=half, before=half, at=half, until=half, after=half)


@pytest.mark.parametrize("budget", [4096, 10])
def test_cosines_are_those_of_explicit_gradients(lm: ResponseModel, batch: AlignmentBatch, budget: int) -> None:
    """In one micro-batch, whose forward pass is kept, and in several."""
    rules = [rule for rule in probe_rules() if rule.key in ("opd", "iw-opd-4", "signed", "ideal-0.1", "suffix-30")]
    assert len(rules) == 5
    chosen = directions(batch, rules, 1.0)
    found = cosines(lm, batch, chosen, range(len(LENGTHS)), budget=budget)
    wanted = explicit_cosines(lm, batch, chosen)
    assert found.keys() == wanted.keys()
    assert len({round(value, 6) for value in wanted.values()}) == len(wanted), "some directions do not differ"
    for key, value in wanted.items():
        assert math.isclose(found[key], value, abs_tol=1e-6), key  # norms and rotations are float32 inside


def test_every_rule_and_advantage_has_its_own_cosine(lm: ResponseModel, batch: AlignmentBatch) -> None:
    rules = probe_rules()
    found = {one.key: one.cosine.mean for one in measure_alignment(lm, [batch], rules, share()).rules}
    gap, kl = batch.tokens.gap, batch.tokens.kl
    unsure = (batch.tokens.more["teacher_entropy", 0] > 0.8).double()
    wanted = {"baseline": gap + kl * batch.tokens.mask, "teacher-entropy": gap * (1.0 + unsure)}
    for key, value in explicit_cosines(lm, batch, wanted).items():
        assert found[key] == pytest.approx(value, abs=1e-6), key
    assert {"power", "clipped", "log-mix", "tip", "prune", "sod", "rising", "scope"} <= found.keys()
    assert all(value is not None for value in found.values())


def test_right_and_wrong_rollouts_by_themselves(lm: ResponseModel, batch: AlignmentBatch) -> None:
    """One right rollout and the first of two wrong ones; the last was not judged."""
    assert (batch.verdict(right=True), batch.verdict(right=False)) == ([0], [1])
    rules = [rule for rule in probe_rules() if rule.key in ("opd", "survival", "signed")]
    heard: list[int] = []
    found = measure_alignment(lm, [batch, batch], rules, share(), ["opd", "survival"], heard.append)
    assert sum(heard) == 2 * (len(rules) + len(REGIONS) + 2 * len(SIDES))
    assert ([one.key for one in found.verdicts], found.compared) == (["opd", "survival"], 2)
    chosen = directions(batch, rules, 1.0)
    right, wrong = (explicit_cosines(lm, batch, chosen, rows) for rows in ([0], [1]))
    for one in found.verdicts:
        assert one.right.mean == pytest.approx(right[one.key], abs=1e-6)
        assert one.wrong.mean == pytest.approx(wrong[one.key], abs=1e-6)
        assert one.difference.mean == pytest.approx(wrong[one.key] - right[one.key], abs=1e-6)


def test_without_right_and_wrong_rollouts_there_is_nothing_to_split(lm: ResponseModel, batch: AlignmentBatch) -> None:
    for correct in (None, torch.tensor([1.0, 1.0, math.nan, 1.0])):
        other = replace(batch, tokens=replace(batch.tokens, correct=correct))
        rules = probe_rules()[:1]
        found = measure_alignment(lm, [other], rules, share(), ["opd"])
        assert (found.verdicts, found.compared) == ([], 0)
        assert found.rules[0].cosine.mean is not None


def test_the_way_to_the_solutions_is_aligned_with_itself(lm: ResponseModel, batch: AlignmentBatch) -> None:
    prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in batch.rollouts]
    responses = list(batch.solutions.values())
    ones = torch.ones(len(responses), max(len(ids) for ids in responses))
    gradients = TokenGradients(lm, prompts, responses)
    first = gradients.of(ones)
    assert math.isclose(cosine(first, gradients.of(3.0 * ones)), 1.0, rel_tol=1e-12)
    assert math.isclose(cosine(first, gradients.of(-ones)), -1.0, rel_tol=1e-12)
    assert math.isnan(cosine(first, gradients.of(torch.zeros_like(ones))))
    assert all(parameter.grad is None for parameter in lm.model.parameters())


def test_intervals_gains_and_regions(lm: ResponseModel, batch: AlignmentBatch) -> None:
    rules = probe_rules()[:3]
    heard: list[int] = []
    found = measure_alignment(lm, [batch, batch], rules, share(), advance=heard.append)
    assert (found.batches, found.batch_prompts) == (2, 4)
    assert [rule.key for rule in found.rules] == ["opd", "iw-opd-0.5", "iw-opd-1"]
    assert [region.key for region in found.regions] == list(REGIONS)
    assert sum(heard) == 2 * (3 + len(REGIONS))
    opd, weighted = found.rules[0], found.rules[1]
    assert opd.gain is None
    assert weighted.gain is not None
    single = cosines(lm, batch, directions(batch, rules, 1.0), range(4))
    assert opd.cosine.mean == pytest.approx(single["opd"])
    assert weighted.gain.mean == pytest.approx(single["iw-opd-0.5"] - single["opd"])
    assert weighted.gain.low == weighted.gain.high == weighted.gain.mean  # the same batch twice


def test_a_batch_without_any_drift_has_nothing_behind_it(lm: ResponseModel, batch: AlignmentBatch) -> None:
    found = cosines(lm, batch, directions(batch, probe_rules()[:1], 50.0), range(4))
    assert math.isnan(found["after"])
    assert math.isnan(found["at"])
    assert math.isclose(found["before"], found["opd"], rel_tol=1e-9)

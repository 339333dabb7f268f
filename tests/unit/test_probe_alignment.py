"""Gradient alignment against a computation with explicit gradients, parameter by parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.drift import drift_regions
from iwopd.algo.evidence import Evidence
from iwopd.algo.gradients import cosine
from iwopd.analysis.probe.alignment import REGIONS, AlignmentBatch, TokenGradients, batch_cosines, measure_alignment
from iwopd.analysis.probe.result import Drift, Estimate
from iwopd.analysis.probe.rules import Rule, probe_rules
from iwopd.lm import ResponseModel
from iwopd.types import Prompt, Rollout
from models import make_model
from support import length_mask

VOCAB = 21
LENGTHS = (7, 3, 5, 1)


@pytest.fixture(scope="module")
def lm() -> ResponseModel:
    model = make_model("qwen3", hidden=16, layers=1).double().eval()
    return ResponseModel(model, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def batch() -> AlignmentBatch:
    torch.manual_seed(3)
    rollouts, solutions = [], []
    for number, length in enumerate(LENGTHS):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, VOCAB, (3 + number,)).tolist()))
        ids = torch.randint(2, VOCAB, (length,))
        rollouts.append(Rollout(prompt, ids, torch.zeros(length), "length"))
        solutions.append((torch.tensor(prompt.token_ids), torch.randint(1, VOCAB, (4 + number,))))
    mask = length_mask(LENGTHS)
    old = torch.where(mask, -torch.rand(mask.shape, dtype=torch.float64), 0.0)
    teacher = torch.where(mask, -4 * torch.rand(mask.shape, dtype=torch.float64), 0.0)
    return AlignmentBatch(rollouts, Evidence(teacher, old, mask, progress=0.0), solutions)


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


def explicit_cosines(lm: ResponseModel, batch: AlignmentBatch, rules: list[Rule], threshold: float) -> dict[str, float]:
    prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in batch.rollouts]
    responses = [rollout.response_ids for rollout in batch.rollouts]
    target = token_gradients(lm.model, [p for p, _ in batch.solutions], [s for _, s in batch.solutions]).sum(0)
    tokens = token_gradients(lm.model, prompts, responses)
    gap, mask = batch.evidence.gap, batch.evidence.mask
    before, at, after = drift_regions(gap, mask, threshold)
    wanted = {rule.key: gap * algo.token_weights(rule.weights, gap, mask, progress=0.0, **rule.params) for rule in rules}
    for key, region in (("before", before), ("at", at), ("until", before | at), ("after", after)):
        wanted[key] = gap * region
    found = {}
    for key, coefficients in wanted.items():
        update = coefficients[mask] @ tokens
        found[key] = float(torch.nn.functional.cosine_similarity(update, target, dim=0))
    return found


@pytest.mark.parametrize("budget", [4096, 10])
def test_cosines_are_those_of_explicit_gradients(lm: ResponseModel, batch: AlignmentBatch, budget: int) -> None:
    """In one micro-batch, whose forward pass is kept, and in several."""
    rules = [rule for rule in probe_rules() if rule.key in ("opd", "iw-opd-4", "signed", "ideal-0.1", "suffix-30")]
    assert len(rules) == 5
    found = batch_cosines(lm, batch, rules, 1.0, budget=budget)
    wanted = explicit_cosines(lm, batch, rules, 1.0)
    assert found.keys() == wanted.keys()
    assert len({round(value, 6) for value in wanted.values()}) == len(wanted), "some directions do not differ"
    for key, value in wanted.items():
        assert math.isclose(found[key], value, abs_tol=1e-6), key  # norms and rotations are float32 inside


def test_the_way_to_the_solutions_is_aligned_with_itself(lm: ResponseModel, batch: AlignmentBatch) -> None:
    prompts, responses = [p for p, _ in batch.solutions], [s for _, s in batch.solutions]
    ones = torch.ones(len(responses), max(len(ids) for ids in responses))
    gradients = TokenGradients(lm, prompts, responses)
    first = gradients.of(ones)
    assert math.isclose(cosine(first, gradients.of(3.0 * ones)), 1.0, rel_tol=1e-12)
    assert math.isclose(cosine(first, gradients.of(-ones)), -1.0, rel_tol=1e-12)
    assert math.isnan(cosine(first, gradients.of(torch.zeros_like(ones))))
    assert all(parameter.grad is None for parameter in lm.model.parameters())


def test_intervals_gains_and_regions(lm: ResponseModel, batch: AlignmentBatch) -> None:
    share = Estimate(mean=0.5)
    drift = Drift(threshold=1.0, rollouts=share, position=share, before=share, at=share, until=share, after=share)
    rules = probe_rules()[:3]
    heard: list[int] = []
    found = measure_alignment(lm, [batch, batch], rules, drift, advance=heard.append)
    assert (found.batches, found.batch_prompts) == (2, 4)
    assert [rule.key for rule in found.rules] == ["opd", "iw-opd-0.5", "iw-opd-1"]
    assert [region.key for region in found.regions] == list(REGIONS)
    assert sum(heard) == 2 * (3 + len(REGIONS))
    opd, weighted = found.rules[0], found.rules[1]
    assert opd.gain is None
    assert weighted.gain is not None
    single = batch_cosines(lm, batch, rules, 1.0)
    assert opd.cosine.mean == pytest.approx(single["opd"])
    assert weighted.gain.mean == pytest.approx(single["iw-opd-0.5"] - single["opd"])
    assert weighted.gain.low == weighted.gain.high == weighted.gain.mean  # the same batch twice


def test_a_batch_without_any_drift_has_nothing_behind_it(lm: ResponseModel, batch: AlignmentBatch) -> None:
    found = batch_cosines(lm, batch, probe_rules()[:1], 50.0)
    assert math.isnan(found["after"])
    assert math.isnan(found["at"])
    assert math.isclose(found["before"], found["opd"], rel_tol=1e-9)

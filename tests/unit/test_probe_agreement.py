"""The probe's agreement of gradients: against autograd on the models' own logits, by groups of rollouts."""

from __future__ import annotations

import math

import pytest
import torch

from iwopd.algo import token_weights
from iwopd.algo.gradients import cosine
from iwopd.algo.objectives import make_objective
from iwopd.analysis.probe.agreement import measure_agreement
from iwopd.analysis.probe.scoring import score_tokens
from iwopd.lm import ResponseModel
from iwopd.types import Prompt, Rollout
from models import make_model

VOCAB, TEMPERATURE = 21, 0.7
GROUPS = [[0, 3], [1, 2], [5]]
"""Rollout 4 is in none."""


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(2, VOCAB, (count,), generator=generator)

    lengths = (6, 4, 9, 3, 5, 1)
    return [
        Rollout(Prompt(f"p{n}", tuple(ids(3).tolist())), ids(size), torch.zeros(size), "length")
        for n, size in enumerate(lengths)
    ]


def pair(student: str = "qwen3") -> list[ResponseModel]:
    models = [make_model(student, vocab=24, seed=1).eval(), make_model("llama", vocab=22, seed=2).eval()]
    return [ResponseModel(model, temperature=TEMPERATURE, vocab_size=VOCAB) for model in models]


def by_hand(lms: list[ResponseModel], chosen: list[Rollout]) -> float:
    """Through the models' own logits, with the student's output matrix moved behind an inserted map."""
    student, teacher = (lm.model for lm in lms)
    sides = [torch.zeros(32, 32, dtype=torch.float64), torch.zeros(32, 32, dtype=torch.float64)]
    for rollout in chosen:
        ids = torch.cat([torch.tensor(rollout.prompt.token_ids), rollout.response_ids])[None, :-1]
        with torch.no_grad():
            states = student.model(input_ids=ids).last_hidden_state[0, -len(rollout) :].double()
            q = (teacher(input_ids=ids).logits[0, -len(rollout) :, :VOCAB].double() / TEMPERATURE).log_softmax(-1)
        one = torch.eye(32, dtype=torch.float64, requires_grad=True)
        logits = (states @ one.t()) @ student.lm_head.weight.detach().double()[:VOCAB].t() / TEMPERATURE
        p = logits.log_softmax(-1)
        places = torch.arange(len(rollout))
        gap = (q - p.detach())[places, rollout.response_ids][None]
        survived = token_weights("survival", gap, torch.ones_like(gap, dtype=torch.bool))[0]
        for place, weights in enumerate((survived, 1.0 - survived)):
            loss = (weights * (p.exp() * (p - q)).sum(-1)).sum()
            sides[place] += torch.autograd.grad(loss, one, retain_graph=True)[0]
    return cosine([sides[0]], [sides[1]])


@pytest.mark.parametrize("budget", [12, 2048])
def test_groups_agree_as_autograd_says(budget: int) -> None:
    lms, chosen = pair(), rollouts()
    tokens = score_tokens(*lms, chosen, top_k=4, groups=GROUPS, budget=budget)
    expected = [by_hand(lms, [chosen[row] for row in group]) for group in GROUPS[:2]]
    assert tokens.agreements[:2] == pytest.approx(expected, abs=1e-4)
    assert abs(expected[0] - expected[1]) > 0.01
    assert math.isnan(tokens.agreements[2])  # one token: nothing comes after it
    assert all(parameter.grad is None for lm in lms for parameter in lm.model.parameters())
    without = score_tokens(*lms, chosen, top_k=4, budget=budget)
    assert without.agreements == ()
    torch.testing.assert_close(without.kl, tokens.kl, rtol=1e-4, atol=1e-5)
    for name in ("student_logprobs", "teacher_logprobs", "gap", "shared"):
        assert torch.equal(getattr(without, name), getattr(tokens, name))


def test_the_gate_of_the_probe_stands_at_what_was_measured() -> None:
    tokens = score_tokens(*pair(), rollouts(), top_k=4, groups=GROUPS)
    gated = make_objective({"weights": "gated"})
    mean = sum(tokens.agreements[:2]) / 2
    for some in (tokens, tokens.part([1, 2]), tokens.cut(torch.full((6,), 2))):
        assert some.evidence(gated).agreement == pytest.approx(mean)
    blind = score_tokens(*pair(), rollouts(), top_k=4)
    assert blind.evidence(gated).agreement == 0.0
    survival = make_objective({"weights": "survival"})
    torch.testing.assert_close(
        gated.signal(blind.evidence(gated)).weights, survival.signal(blind.evidence(survival)).weights, rtol=0, atol=1e-8
    )


def test_a_head_that_is_no_matrix_has_none() -> None:
    lms = pair("gemma2")
    assert score_tokens(*lms, rollouts(), top_k=4, groups=GROUPS).agreements == ()
    assert not lms[0].fused


def test_over_batches() -> None:
    found = measure_agreement([0.2, 0.3, math.nan, 0.1], 8)
    assert found is not None
    assert (found.batches, found.batch_prompts) == (3, 8)
    assert found.cosine.mean == pytest.approx(0.2)
    assert found.cosine.low == pytest.approx(0.2 - 4.302653 * 0.1 / math.sqrt(3), abs=1e-5)
    assert found.gate == pytest.approx(0.5)
    wide = measure_agreement([-0.9, 0.9], 8)
    assert wide is not None
    assert (wide.cosine.low, wide.cosine.high, wide.gate) == (-1.0, 1.0, 0.0)
    alone = measure_agreement([0.9], 8)
    assert alone is not None
    assert (alone.cosine.mean, alone.cosine.low, alone.gate) == (0.9, None, 1.0)
    assert measure_agreement([math.nan], 8) is None
    assert measure_agreement([], 8) is None

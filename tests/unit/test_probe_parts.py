"""The parts of a probe: scores against the models' own logits, positions and rules against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from iwopd.algo import WEIGHT_RULES
from iwopd.algo.objectives import make_objective
from iwopd.analysis.probe.intervals import Bootstrap
from iwopd.analysis.probe.positions import (
    half_spent,
    measure_drift,
    measure_likelihood,
    measure_positions,
    measure_top_k_overlap,
)
from iwopd.analysis.probe.result import ProbeError
from iwopd.analysis.probe.rules import measure_rules, probe_rules
from iwopd.analysis.probe.scoring import Tokens, score_tokens
from iwopd.lm import ResponseModel
from iwopd.methods import ALPHAS
from iwopd.types import Prompt, Rollout, number_prompts
from models import make_model
from support import length_mask, poison

VOCAB = 21


def rollouts(lengths: tuple[int, ...] = (6, 2, 9, 1)) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(2, VOCAB, (count,), generator=generator)

    found = []
    for number, length in enumerate(lengths):
        prompt = Prompt(f"p{number // 2}", tuple(ids(3 + number).tolist()))
        found.append(Rollout(prompt, ids(length), torch.zeros(length), "length", number % 2))
    return found


@pytest.mark.parametrize(("student", "teacher"), [("qwen3", "llama"), ("gemma2", "qwen3")])
def test_scores_are_those_of_the_models_own_logits(student: str, teacher: str) -> None:
    """Two architectures, more rows than ids, a temperature; Gemma's capped logits take the slow path."""
    models = [make_model(student, vocab=24, seed=1).eval(), make_model(teacher, vocab=22, seed=2).eval()]
    lms = [ResponseModel(model, temperature=0.7, vocab_size=VOCAB) for model in models]
    chosen = rollouts()
    sections: list[dict[str, Any]] = [
        {"weights": "teacher-entropy"},
        {"weights": "tip"},
        {"weights": "prune", "params": {"k": 6}},
        {"advantage": "baseline", "k": 3},
        {"advantage": "baseline"},
    ]
    methods = [make_objective(section) for section in sections]
    tokens = score_tokens(lms[0], lms[1], chosen, top_k=4, methods=methods, budget=12)
    assert lms[0].fused == (student != "gemma2")
    assert tokens.prompts == [0, 0, 1, 1] == number_prompts(chosen)
    assert tokens.mask.sum(-1).tolist() == [6, 2, 9, 1]
    for row, rollout in enumerate(chosen):
        ids = torch.cat([torch.tensor(rollout.prompt.token_ids), rollout.response_ids])[None, :-1]
        with torch.no_grad():
            ours, theirs = (model(input_ids=ids).logits[0, -len(rollout) :, :VOCAB].double() / 0.7 for model in models)
        p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
        places = torch.arange(len(rollout))
        wanted = {
            "student_logprobs": p[places, rollout.response_ids],
            "teacher_logprobs": q[places, rollout.response_ids],
            "gap": (q - p)[places, rollout.response_ids],
            "kl": (p.exp() * (p - q)).sum(-1),
        }
        few = p.topk(3).indices
        p3, q3 = p.gather(1, few).log_softmax(-1), q.gather(1, few).log_softmax(-1)
        further = {
            ("teacher_entropy", 0): -(q.exp() * q).sum(-1),
            ("student_entropy", 0): -(p.exp() * p).sum(-1),
            ("kl", 3): (p3.exp() * (p3 - q3)).sum(-1),
        }
        assert tokens.more.keys() == {*further, ("top_overlap", 6)}
        found = {name: getattr(tokens, name) for name in wanted} | dict(tokens.more)
        for name, values in {**wanted, **further}.items():
            numbers = found[name][row, : len(rollout)].double()
            torch.testing.assert_close(numbers, values, atol=2e-4, rtol=1e-4, msg=f"{name} of row {row}")
        for place in range(len(rollout)):
            common = set(ours[place].topk(4).indices.tolist()) & set(theirs[place].topk(4).indices.tolist())
            assert float(tokens.shared[row, place]) == len(common) / 4
            assert float(tokens.same_first[row, place]) == float(ours[place].argmax() == theirs[place].argmax())
            common = set(ours[place].topk(6).indices.tolist()) & set(theirs[place].topk(6).indices.tolist())
            assert float(tokens.more["top_overlap", 6][row, place]) == pytest.approx(len(common) / 6)
    assert torch.equal(tokens.evidence(methods[-1]).kl, tokens.kl)  # type: ignore[arg-type]
    assert torch.equal(tokens.evidence(methods[-2]).kl, tokens.more["kl", 3])  # type: ignore[arg-type]
    assert tokens.evidence(make_objective({})).kl is None
    part = tokens.part([1, 3])
    assert (part.mask.sum(-1).tolist(), part.prompts, part.more["kl", 3].shape) == ([2, 1], [0, 1], (2, 2))


GAP = torch.tensor([[-3.0, -1.0, 0.0, 0.0], [-0.5, 0.5, 0.0, 0.0]])
MASK = length_mask([4, 2])


def tokens_of(gap: torch.Tensor = GAP, mask: torch.Tensor = MASK) -> Tokens:
    student = torch.full_like(gap, -0.25)
    return Tokens(
        mask=mask,
        prompts=list(range(len(gap))),
        student_logprobs=torch.where(mask, student, 0.0),
        teacher_logprobs=torch.where(mask, student + gap, 0.0),
        gap=gap,
        kl=poison(2 * gap.abs(), mask),
        shared=poison(torch.full_like(gap, 0.5), mask),
        same_first=poison(torch.ones_like(gap), mask),
        more={
            ("student_entropy", 0): poison(torch.rand_like(gap), mask),
            ("teacher_entropy", 0): poison(2 * torch.arange(gap.shape[1]).expand_as(gap).float(), mask),
            ("top_overlap", 4): poison(torch.full_like(gap, 0.5), mask),
        },
        correct=torch.tensor([1.0, *([0.0] * (len(gap) - 1))]),
    )


def test_positions_by_hand() -> None:
    found = measure_positions(tokens_of(), Bootstrap([0, 1]), 2)
    assert found.edges == [0.0, 0.5, 1.0]
    assert found.tokens == [3, 3]
    assert found.abs_gap.mean == pytest.approx([4.5 / 3, 0.5 / 3])
    assert found.gap.mean == pytest.approx([-4.5 / 3, 0.5 / 3])
    assert found.kl.mean == pytest.approx([9 / 3, 1 / 3])
    assert found.share.mean == pytest.approx([4.5 / 5, 0.5 / 5])
    assert found.kl_share.mean == pytest.approx([4.5 / 5, 0.5 / 5])
    assert found.mean_abs_gap.mean == pytest.approx(5 / 6)
    assert found.mean_kl.mean == pytest.approx(10 / 6)
    assert found.first_30.mean == pytest.approx(4.5 / 5)  # ceil(0.3 * 4) = 2 tokens, ceil(0.3 * 2) = 1
    # The tokens of the first rollout stand at 0, 1/4, 1/2, 3/4 of it, those of the second at 0 and 1/2, each in one bin of 100:
    # 3.5 of 5 nats stand in the first.
    assert found.half.mean == pytest.approx(2.5 / 3.5 / 100)


def test_half_is_interpolated_and_knows_nothing() -> None:
    assert float(half_spent(torch.tensor([1.0, 1.0, 1.0, 1.0]))) == 0.5
    assert float(half_spent(torch.tensor([0.0, 4.0]))) == 0.75
    assert float(half_spent(torch.tensor([3.0, 1.0]))) == pytest.approx(1 / 3)
    assert math.isnan(float(half_spent(torch.tensor([0.0, 0.0]))))
    assert half_spent(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [0.25, 0.75]


def test_drift_by_hand() -> None:
    found = measure_drift(tokens_of(), Bootstrap([0, 1]), 0.9)
    assert found.rollouts.mean == 0.5
    assert found.position.mean == 0.0
    assert [found.before.mean, found.at.mean, found.until.mean, found.after.mean] == pytest.approx([0.2, 0.6, 0.8, 0.2])
    later = measure_drift(tokens_of(GAP.flip(-1), length_mask([4, 4])), Bootstrap([0, 1]), 2.0)
    assert later.position.mean == 0.75
    nowhere = measure_drift(tokens_of(), Bootstrap([0, 1]), 9.0)
    assert (nowhere.rollouts.mean, nowhere.position.mean, nowhere.before.mean) == (0.0, None, 1.0)


def test_overlap_and_likelihood_by_hand() -> None:
    bootstrap = Bootstrap([0, 1])
    overlap = measure_top_k_overlap(tokens_of(), bootstrap, 2, k=3, vocabulary=30)
    assert (overlap.chance, overlap.shared.mean, overlap.same_first.mean) == (0.1, [0.5, 0.5], [1.0, 1.0])
    found = measure_likelihood(tokens_of(), bootstrap, 2)
    # Prefixes, last token included: student -0.25 .. -1 and -0.25, -0.5; teacher -3.25, -4.5, -4.75, -5 and -0.75, -0.5.
    assert found.by_fraction.student.mean == pytest.approx([-1.0 / 3, -2.25 / 3])
    assert found.by_fraction.teacher.mean == pytest.approx([-8.5 / 3, -10.25 / 3])
    assert found.by_fraction.difference.mean == pytest.approx([-7.5 / 3, -8.0 / 3])
    assert found.by_token.edges == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found.by_token.rollouts == [2, 2, 1, 1]
    assert found.by_token.teacher.mean == pytest.approx([-2.0, -2.5, -4.75, -5.0])
    assert (found.student.mean, found.teacher.mean, found.difference.mean) == (-0.75, -2.75, -2.0)


def test_long_answers_have_bounded_curves() -> None:
    mask = length_mask([1000, 3])
    found = measure_likelihood(tokens_of(torch.zeros(mask.shape), mask), Bootstrap([0, 1]), 10)
    assert len(found.by_token.rollouts) <= 64
    assert found.by_token.edges[1] == 16.0


def test_every_rule_is_there_and_plain_opd_first() -> None:
    rules = probe_rules(0.75)
    assert rules[0].key == "opd"
    assert {rule.weights for rule in rules} == set(WEIGHT_RULES)
    assert {rule.advantage for rule in rules} == {"opd", "power", "baseline", "clipped", "log-mix"}
    assert all(rule.weights == "uniform" for rule in rules if rule.advantage != "opd")
    keys = [rule.key for rule in rules]
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if key.startswith("iw-opd")] == [f"iw-opd-{g}" for g in ("0.5", "0.75", "1", "2", "4")]
    assert {f"ideal-{alpha:g}" for alpha in ALPHAS} <= set(keys)
    assert len(ALPHAS) == 4


def test_rules_by_hand() -> None:
    found = measure_rules(tokens_of(), Bootstrap([0, 1]), 2, probe_rules())
    effects = {rule.key: rule for rule in found.rules}
    assert effects["opd"].weights.mean == [1.0, 1.0]
    assert effects["opd"].effective.mean == 1.0
    assert effects["opd"].first_30.mean == pytest.approx(0.9)
    assert effects["prefix-30"].effective.mean == pytest.approx(0.5)  # 2 of 4 and 1 of 2 tokens
    assert effects["prefix-30"].first_30.mean == 1.0
    assert effects["suffix-30"].first_30.mean == 0.0
    # Shares still ahead: 1, 1/4, 0, 0 and 1, 0 (the last token takes no part in the total).
    assert effects["surrogate-only"].weights.mean == pytest.approx([2.25 / 3, 0.0])
    assert effects["iw-opd-4"].weights.mean == pytest.approx([1 + 4 * 2.25 / 3, 1.0])
    assert effects["iw-opd-4"].first_30.mean == pytest.approx((15 + 2 + 2.5) / (15 + 2 + 2.5 + 0.5))
    assert effects["prune"].weights.mean == pytest.approx([1.5 - 0.04 / 3, 1.5 - 0.09 / 3])  # counts 1, 2, 1 and 3, 4, 2
    assert effects["teacher-entropy"].weights.mean == pytest.approx([4 / 3, 2.0])  # 0, 2, 4, 6 and 0, 2 nats
    assert effects["clipped"].advantage == "clipped"
    bound = math.log(0.1) / 0.9
    assert effects["clipped"].first_30.mean == pytest.approx((1.5 - bound) / (2 - bound))
    # The KL is twice |gap|: 3, 1, 0, 0 and 0.5, 1.5.
    assert effects["baseline"].first_30.mean == pytest.approx(4.5 / 6)
    sums = found.cumulative
    assert sums.signed.mean == pytest.approx([-3 / 3, (-4 - 4 - 0.5) / 3])
    assert sums.unsigned.mean == pytest.approx([3 / 3, (4 + 4 + 0.5) / 3])
    assert sums.rebound.mean == 0.0
    assert sums.opposite.mean == pytest.approx(0.1)


def test_a_rule_from_the_command_line() -> None:
    rules = probe_rules(more=["survival:tau=2, floor=0.1", "linear-decay", "survival:tau=2, floor=0.1"])
    assert [(rule.key, rule.weights, rule.params) for rule in rules][-1:] == [
        ("survival:tau=2, floor=0.1", "survival", {"tau": 2, "floor": 0.1}),
    ]
    assert sum(rule.key == "linear-decay" for rule in rules) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("survivel", "did you mean 'survival'"),
        ("survival:tau", "name=value"),
        ("survival:tau=-1", "tau must be positive"),
        ("survival:speed=1", "no parameter 'speed'"),
    ],
)
def test_a_wrong_rule_is_refused_before_anything_is_loaded(text: str, words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        probe_rules(more=[text])

"""What training records for the report: the full-vocabulary KL of kept rollouts, and the signed gap by position."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import make_objective
from iwopd.algo.views import Wanted
from iwopd.teacher.local import LocalScorer
from iwopd.train.metrics import evidence_metrics, step_metrics
from iwopd.train.scoring import pair_kl
from iwopd.types import Prompt, Rollout
from models import make_model


def rollouts() -> list[Rollout]:
    torch.manual_seed(0)
    made = []
    for place, length in enumerate((5, 1, 9)):
        ids = torch.randint(2, 21, (length,))
        made.append(Rollout(Prompt(str(place), (3, 4, 5 + place)), ids, torch.zeros(length), "length"))
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_of_kept_rollouts_is_that_of_the_models_own_logits(temperature: float) -> None:
    student = make_model("qwen3", vocab=24, seed=1)
    teacher = make_model("llama", hidden=48, vocab=32, seed=2)  # other sizes, and rows that no id stands for
    student.train()
    options = {"temperature": temperature, "vocab_size": 21}
    scorers = [LocalScorer(model, **options) for model in (student, teacher)]
    looks = [scorer.look(rollouts(), Wanted(states=True)) for scorer in scorers]
    matrices = [scorer.output_matrix() for scorer in scorers]
    found = [pair_kl(ours, matrices[0], theirs, matrices[1]) for ours, theirs in zip(*looks, strict=True)]
    assert student.training
    student.eval()
    for rollout, kl in zip(rollouts(), found, strict=True):
        whole = torch.tensor([*rollout.prompt.token_ids, *rollout.response_ids.tolist()])[None]
        with torch.no_grad():
            logits = [model(whole).logits[0, 2:-1, :21].double() / temperature for model in (student, teacher)]
        p, q = (values.log_softmax(-1) for values in logits)
        torch.testing.assert_close(kl.double(), (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=1e-4)
        assert kl.shape == rollout.response_ids.shape


def test_kl_by_position_is_the_signed_gap() -> None:
    mask = torch.ones(1, 20, dtype=torch.bool)
    old, teacher = -torch.arange(20.0)[None] / 10, torch.full((1, 20), -1.0)
    evidence = Evidence(teacher, old, mask)
    signal = make_objective({}).signal(evidence)
    update = SimpleNamespace(padding_waste=0.0, updates=1, skipped=0, agreement=0.25, stats=SimpleNamespace(as_dict=dict))
    rollout = Rollout(Prompt("p", (1,)), torch.ones(20, dtype=torch.long), torch.zeros(20), "eos")
    scored = SimpleNamespace(evidence=evidence, floored=0, rewards=None, thinking=None, batch=SimpleNamespace(spans=None))
    written = SimpleNamespace(rollouts=[rollout], overrun=None)
    metrics = step_metrics(scored, signal, written, update, make_objective({}))
    expected = [float((old - teacher)[0, 2 * place : 2 * place + 2].mean()) for place in range(10)]
    assert metrics["position/kl"] == pytest.approx(expected)
    assert sum(metrics["position/kl"]) / 10 == pytest.approx(metrics["kl/sampled"])
    assert not {"student/entropy", "teacher/entropy", "kl/full", "kl/top_k", "teacher/top_overlap"} & set(metrics)


def test_evidence_that_was_computed_anyway_is_logged() -> None:
    mask, half = torch.tensor([[True, True, False]]), torch.tensor([[1.0, 2.0, 90.0]])
    more = {
        name: factor * half for name, factor in (("student_entropy", 1), ("teacher_entropy", 2), ("kl", 3), ("top_overlap", 4))
    }
    evidence = Evidence(half, half, mask, **more)
    whole = evidence_metrics(evidence, mask, make_objective({"advantage": "baseline"}))
    assert whole == {"student/entropy": 1.5, "teacher/entropy": 3.0, "kl/full": 4.5, "teacher/top_overlap": 6.0}
    assert evidence_metrics(evidence, mask, make_objective({"advantage": "baseline", "k": 5}))["kl/top_k"] == 4.5

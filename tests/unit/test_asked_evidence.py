"""From rollouts to evidence: scorers are asked for what the method needs, and for nothing where it needs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo.objectives import make_objective
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config import make_config
from iwopd.teacher.local import LocalScorer
from iwopd.train.pipeline import Written
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import ScoredStep, score_step
from iwopd.types import Prompt, Rollout
from models import make_model

VOCAB = 21
LENGTHS = (6, 2, 5)


class Counting(LocalScorer):
    """Remembers everything that it was asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__(make_model("qwen3", seed=seed).eval(), vocab_size=VOCAB)
        self.heard: list[tuple[Wanted, bool]] = []

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        self.heard.append((wanted, chosen is not None))
        return super().look(rollouts, wanted, chosen)


def rollouts() -> list[Rollout]:
    """The first and the last answer the same prompt."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        prompt = Prompt(f"p{number % 2}", (3, 4 + number % 2))
        ids = torch.randint(2, VOCAB, (length,), generator=generator)
        found.append(Rollout(prompt, ids, torch.zeros(length), "eos"))
    return found


def step(section: dict[str, Any]) -> tuple[ScoredStep, Counting, Counting]:
    """A scored step, and the two models that were asked."""
    student, teacher, objective = Counting(1), Counting(2), make_objective(section)
    parts: Any = SimpleNamespace(
        objective=objective,
        learner=SimpleNamespace(forward=lambda kept, wanted: None),
        student_scorer=student,
        teacher_scorer=teacher,
        reference_scorer=None,
        ranks=Ranks(),
        engine=SimpleNamespace(exact=True),
        rewards=None,
        thinking=None,
        agreement=0.0,
        others=None,
    )
    written = Written(rollouts(), teacher, Ranks(), None, 1, objective.asks.teacher)
    return score_step(make_config({"models": {"world": "clean"}}), parts, written, 1), student, teacher


def distributions(scorer: LocalScorer, rollout: Rollout) -> Tensor:
    """[T, V] log-probs from a plain forward pass."""
    ids = torch.tensor([*rollout.prompt.token_ids, *rollout.response_ids.tolist()])[None]
    with torch.no_grad():
        logits = scorer.lm.model(input_ids=ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1, :VOCAB]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("section", [{}, {"weights": "cumulative-share"}, {"weights": "survival"}, {"advantage": "clipped"}])
def test_methods_of_log_probs_alone_cost_nothing_more(section: dict[str, Any]) -> None:
    scored, student, teacher = step(section)
    assert student.heard == teacher.heard == [(NOTHING, False)]
    assert scored.batch.more == {}
    assert scored.batch.teacher_states is None


def test_entropies_and_the_whole_kl_are_those_of_the_models() -> None:
    scored, student, teacher = step({"weights": "tip", "advantage": "baseline"})
    assert student.heard == [(Wanted(entropy=True, states=True), False)]
    assert teacher.heard == [(Wanted(states=True), False)]
    assert scored.batch.teacher_states is None  # made into numbers at once
    for row, rollout in enumerate(rollouts()):
        p, q = distributions(student, rollout), distributions(teacher, rollout)
        wanted = {"student_entropy": -(p.exp() * p).sum(-1), "kl": (p.exp() * (p - q)).sum(-1)}
        for name, values in wanted.items():
            found = getattr(scored.evidence, name)[row, : len(rollout)].double()
            torch.testing.assert_close(found, values, atol=1e-5, rtol=1e-4, msg=name)


def test_a_kl_over_likely_ids_needs_no_states() -> None:
    """The teacher is asked about the ids that the student finds likeliest."""
    scored, student, teacher = step({"advantage": "baseline", "k": 5})
    assert student.heard == [(Wanted(top_k=5), False)]
    assert teacher.heard == [(Wanted(chosen=True), True)]
    for row, rollout in enumerate(rollouts()):
        p, q = distributions(student, rollout), distributions(teacher, rollout)
        ids = p.topk(5).indices
        p, q = p.gather(1, ids).log_softmax(-1), q.gather(1, ids).log_softmax(-1)
        assert scored.evidence.kl is not None
        found = scored.evidence.kl[row, : len(rollout)].double()
        torch.testing.assert_close(found, (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=1e-4)


def test_overlap_and_teacher_entropy() -> None:
    scored, student, teacher = step({"weights": "prune", "params": {"k": 4}})
    assert student.heard == teacher.heard == [(Wanted(top_k=4), False)]
    rollout = rollouts()[0]
    p, q = distributions(student, rollout), distributions(teacher, rollout)
    shared = [len(set(a.topk(4).indices.tolist()) & set(b.topk(4).indices.tolist())) / 4 for a, b in zip(p, q, strict=True)]
    assert scored.evidence.top_overlap is not None
    assert scored.evidence.top_overlap[0].tolist() == shared
    scored, student, teacher = step({"weights": "teacher-entropy"})
    assert (student.heard, teacher.heard) == ([(NOTHING, False)], [(Wanted(entropy=True), False)])
    assert scored.evidence.teacher_entropy is not None
    found = scored.evidence.teacher_entropy[0].double()
    torch.testing.assert_close(found, -(q.exp() * q).sum(-1), atol=1e-5, rtol=1e-4)


def test_rollouts_know_which_prompt_they_answer() -> None:
    scored, student, teacher = step({"weights": "scope"})
    assert student.heard == teacher.heard == [(NOTHING, False)]
    assert scored.evidence.prompt is not None
    assert [float(row[0]) for row in scored.evidence.prompt] == [0.0, 1.0, 0.0]

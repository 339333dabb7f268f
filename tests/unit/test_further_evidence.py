"""Evidence beside log-probs: who is asked for what, and what is made of the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo.asking import Support, asked_for, further_evidence
from iwopd.algo.objectives import make_objective
from iwopd.algo.views import NO_ID, NOTHING, TokenScores, Wanted, scores_of_logits

SIZE, ROWS = 11, 5


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(ROWS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both(needs: set[str], **options: Any) -> tuple[TokenScores, TokenScores]:
    """What student and teacher answer when they are asked for this evidence."""
    asked, targets = asked_for(needs, **options), torch.zeros(ROWS, dtype=torch.long)
    student = scores_of_logits(logits(1), targets, replace(asked.student, states=False))
    teacher = scores_of_logits(logits(2), targets, replace(asked.teacher, states=False), student.top_ids)
    return student, teacher


@pytest.mark.parametrize("section", [{}, {"weights": "cumulative-share"}, {"weights": "survival"}, {"advantage": "exopd"}])
def test_plain_methods_ask_nobody_for_anything(section: dict[str, Any]) -> None:
    asked = make_objective(section).asks
    assert asked.student == asked.teacher == NOTHING
    assert not asked.student_first


@pytest.mark.parametrize(
    ("needs", "options", "student", "teacher"),
    [
        ({"student_entropy"}, {}, Wanted(entropy=True), NOTHING),
        ({"teacher_entropy"}, {}, NOTHING, Wanted(entropy=True)),
        ({"top_overlap"}, {"overlap_k": 4}, Wanted(top_k=4), Wanted(top_k=4)),
        ({"kl"}, {}, Wanted(states=True), Wanted(states=True)),
        ({"kl"}, {"kl_k": 3}, Wanted(top_k=3), Wanted(chosen=True)),
        ({"kl", "top_overlap"}, {"kl_k": 3, "overlap_k": 5}, Wanted(top_k=5), Wanted(top_k=5, chosen=True)),
        ({"gap"}, {"kl_k": 3, "overlap_k": 5}, NOTHING, NOTHING),
    ],
)
def test_who_is_asked_for_what(needs: set[str], options: dict[str, Any], student: Wanted, teacher: Wanted) -> None:
    asked = asked_for(needs, **options)
    assert (asked.student, asked.teacher) == (student, teacher)
    assert asked.student_first == teacher.chosen


def test_the_kl_over_likely_ids_is_the_renormalised_one() -> None:
    student, teacher = both({"kl", "top_overlap"}, kl_k=4, overlap_k=6)
    found = further_evidence({"kl"}, student, teacher, kl_k=4)["kl"]
    ids = logits(1).topk(4).indices
    p, q = (values.gather(1, ids).softmax(-1) for values in (logits(1), logits(2)))
    torch.testing.assert_close(found, (p * (p / q).log()).sum(-1))
    with pytest.raises(ValueError, match="kl is needed, but the model that was asked did not give it"):
        further_evidence({"kl"}, student, replace(teacher, chosen_logprobs=None), kl_k=4)


@pytest.mark.parametrize("of", ["teacher", "student", "union"])
def test_ids_that_a_support_does_not_take_count_as_the_rest(of: Any) -> None:
    """More likely ids are known than the support wants, because other evidence asks for more."""
    support = Support(2, of)
    student, teacher = both({"kl", "top_overlap"}, kl_k=5, overlap_k=4, support=support)
    found = further_evidence({"kl"}, student, teacher, kl_k=5, support=support)
    q = logits(2).softmax(-1)
    for token in range(ROWS):
        ids = [int(one) for one in found["support_ids"][token] if one != NO_ID]
        top = {"teacher": logits(2), "student": logits(1)}
        wanted = {int(one) for name in top if of in (name, "union") for one in top[name][token].topk(2).indices}
        assert len(ids) == len(set(ids))
        assert set(ids) == wanted
        kept = float(q[token, ids].sum())
        assert float(found["support_rest"][token].exp()) == pytest.approx(1.0 - kept, rel=1e-9)

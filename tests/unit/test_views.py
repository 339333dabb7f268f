"""What a model says of tokens beside log-probs, against whole softmaxes; and the evidence that is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo.asking import Support, asked_for, further_evidence
from iwopd.algo.objectives import make_objective
from iwopd.algo.views import NO_ID, NOTHING, REST_FLOOR, TokenScores, Wanted, joined_scores, token_scores
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout
from models import make_model

N, V, ROWS, H = 9, 13, 16, 5


def states(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, output matrix with padding rows, bias, written ids."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(ROWS, H, generator=generator, dtype=torch.float64)
    return (
        hidden,
        weight,
        torch.randn(ROWS, generator=generator, dtype=torch.float64),
        torch.randint(V, (N,), generator=generator),
    )


def softmax(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: float) -> Tensor:
    return ((hidden @ weight.T + bias)[:, :V] / temperature).log_softmax(-1)


ALL = Wanted(entropy=True, top_k=4, chosen=True, states=True)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_everything_is_that_of_the_whole_softmax(temperature: float) -> None:
    hidden, weight, bias, ids = states()
    chosen = torch.stack([torch.randperm(V)[:3] for _ in range(N)])
    chosen[2, 1] = NO_ID
    found = token_scores(hidden, weight, ids, ALL, chosen=chosen, bias=bias, temperature=temperature, vocab_size=V)
    whole = softmax(hidden, weight, bias, temperature)
    torch.testing.assert_close(found.logprobs, whole.gather(1, ids[:, None]).squeeze(1))
    torch.testing.assert_close(found.entropy, -(whole.exp() * whole).sum(1))
    assert found.top_ids is not None
    assert found.chosen_logprobs is not None
    assert torch.equal(found.top_ids, whole.topk(4).indices)
    torch.testing.assert_close(found.top_logprobs, whole.topk(4).values)
    real = chosen != NO_ID
    torch.testing.assert_close(found.chosen_logprobs[real], whole.gather(1, chosen.clamp(min=0))[real])
    outside = torch.ones(N, V, dtype=torch.bool).scatter_(1, found.top_ids, False)
    for row in range(N):
        outside[row, chosen[row][real[row]]] = False
    torch.testing.assert_close(found.rest, torch.where(outside, whole.exp(), 0.0).sum(1).log())
    assert found.states is hidden


def test_only_what_is_wanted_is_there_and_no_tokens_have_it_too() -> None:
    hidden, weight, _, ids = states()
    plain = token_scores(hidden, weight, ids)
    assert [plain.entropy, plain.top_ids, plain.rest, plain.states] == [None] * 4
    nothing = token_scores(hidden[:0], weight, ids[:0], Wanted(entropy=True, top_k=2))
    assert nothing.entropy is not None
    assert nothing.top_ids is not None
    assert nothing.top_ids.shape == (0, 2)


def test_a_rest_of_nothing_is_floored_and_tiny_ones_are_exact() -> None:
    weight = torch.tensor([[0.0], [-30.0], [-60.0]], dtype=torch.float64)
    found = token_scores(torch.ones(1, 1, dtype=torch.float64), weight, torch.tensor([0]), Wanted(top_k=1))
    assert found.rest is not None
    assert float(found.rest) == REST_FLOOR  # e^-30, below the floor
    some = token_scores(torch.full((1, 1), 0.5, dtype=torch.float64), weight, torch.tensor([0]), Wanted(top_k=1))
    assert some.rest is not None
    assert float(some.rest) == pytest.approx(-15.0, abs=1e-4)  # 1 minus the sum would have nothing left of it in float32


def test_ids_that_cannot_occur_and_wrong_requests() -> None:
    hidden, weight, _, ids = states()
    ids[3] = V + 1
    assert token_scores(hidden, weight, ids, vocab_size=V).logprobs[3] == -torch.inf
    with pytest.raises(ValueError, match="top_k is 14, the vocabulary has 13 ids"):
        token_scores(hidden, weight, ids, Wanted(top_k=14), vocab_size=V)
    with pytest.raises(ValueError, match="no ids were given"):
        token_scores(hidden, weight, ids, Wanted(chosen=True), vocab_size=V)


def test_parts_join_and_split() -> None:
    hidden, weight, bias, ids = states()
    whole = token_scores(hidden, weight, ids, Wanted(entropy=True, top_k=3), bias=bias)
    again = joined_scores(whole.split([2, 0, 7]))
    for name in ("logprobs", "entropy", "top_ids", "top_logprobs", "rest"):
        assert torch.equal(getattr(whole, name), getattr(again, name))


def rollouts() -> list[Rollout]:
    made = []
    for number, length in enumerate([4, 1, 7]):
        ids = torch.randint(2, 21, (length,), generator=torch.Generator().manual_seed(number))
        made.append(Rollout(Prompt(str(number), (3, 4 + number)), ids, torch.zeros(length), "length"))
    return made


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_scorer_says_it_of_rollouts_also_from_the_models_own_logits(kind: str) -> None:
    """Gemma-2 caps its logits: its head is no plain matrix, so hidden states are not on offer."""
    model = make_model(kind)
    scorer = LocalScorer(model, vocab_size=21)
    from iwopd.lm import Sequences

    scorer.check_head(Sequences.from_rollouts(rollouts()))
    wanted = Wanted(entropy=True, top_k=3, chosen=True)
    chosen = [torch.randint(21, (len(one), 2)) for one in rollouts()]
    assert wanted.names <= scorer.gives
    assert ("states" in scorer.gives) == (kind == "qwen3")
    for one, ids, found in zip(rollouts(), chosen, scorer.look(rollouts(), wanted, chosen), strict=True):
        whole = torch.tensor([*one.prompt.token_ids, *one.response_ids.tolist()])[None]
        with torch.no_grad():
            logprobs = model(whole).logits[0, 1:-1, :21].double().log_softmax(-1)
        assert found.chosen_logprobs is not None
        torch.testing.assert_close(found.chosen_logprobs.double(), logprobs.gather(1, ids), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.entropy.double(), -(logprobs.exp() * logprobs).sum(1), atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]
        torch.testing.assert_close(found.top_logprobs.double(), logprobs.topk(3).values, atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]


# --- what is asked, and what is made of the answers ---


@pytest.mark.parametrize(
    ("method", "student", "teacher"),
    [
        ({}, NOTHING, NOTHING),
        ({"weights": "cumulative-share"}, NOTHING, NOTHING),
        ({"objective": "divergence"}, NOTHING, Wanted(states=True)),
        ({"objective": "divergence", "support": "top-k", "k": 7}, NOTHING, Wanted(top_k=7)),
        ({"objective": "divergence", "support": "top-k", "support_of": "student"}, Wanted(top_k=64), Wanted(chosen=True)),
        (
            {"objective": "divergence", "support": "top-k", "k": 2, "support_of": "union"},
            Wanted(top_k=2),
            Wanted(top_k=2, chosen=True),
        ),
    ],
)
def test_methods_ask_for_what_they_need_and_nothing_else(method: dict[str, Any], student: Wanted, teacher: Wanted) -> None:
    asked = make_objective(method).asks
    assert (asked.student, asked.teacher) == (student, teacher)


def test_evidence_by_name() -> None:
    needs = {"student_entropy", "teacher_entropy", "top_overlap", "gap"}
    asked = asked_for(needs, overlap_k=2)
    assert asked.student == asked.teacher == Wanted(entropy=True, top_k=2)
    one = TokenScores(torch.zeros(1), torch.ones(1), torch.tensor([[3, 4]]), torch.zeros(1, 2))
    two = TokenScores(torch.zeros(1), torch.full((1,), 2.0), torch.tensor([[4, 5]]), torch.zeros(1, 2))
    found = further_evidence(needs, one, two, overlap_k=2)
    assert {name: float(values) for name, values in found.items()} == {
        "student_entropy": 1.0,
        "teacher_entropy": 2.0,
        "top_overlap": 0.5,
    }
    with pytest.raises(ValueError, match="student_entropy is needed, but"):
        further_evidence({"student_entropy"}, TokenScores(torch.zeros(1)), two)


def test_a_support_has_no_id_twice_and_its_probabilities_add_up() -> None:
    hidden, weight, bias, ids = states(3)
    student = token_scores(hidden, weight, ids, Wanted(top_k=5), bias=bias, vocab_size=V)
    other, matrix, shift, _ = states(4)
    teacher = token_scores(other, matrix, ids, Wanted(top_k=5, chosen=True), chosen=student.top_ids, bias=shift, vocab_size=V)
    whole = softmax(other, matrix, shift, 1.0)
    for of in ("teacher", "student", "union"):
        # More ids were asked for than the support takes: what is left over belongs to the rest.
        asked = teacher if of != "teacher" else token_scores(other, matrix, ids, Wanted(top_k=5), bias=shift, vocab_size=V)
        size = 5 if of != "teacher" else 3
        found = further_evidence({"support"}, student, asked, support=Support(size, of))  # type: ignore[arg-type]
        chosen, logprobs = found["support_ids"], found["support_logprobs"]
        for row in range(N):
            real = chosen[row][chosen[row] != NO_ID]
            assert len(set(real.tolist())) == len(real)
            torch.testing.assert_close(logprobs[row][chosen[row] != NO_ID], whole[row, real])
            left = [token for token in range(V) if token not in set(real.tolist())]
            torch.testing.assert_close(found["support_rest"][row], whole[row, left].logsumexp(0))

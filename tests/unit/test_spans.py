"""Spans: where two tokenisations cut alike, what a batch becomes on them, and what rules and losses make of it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import PolicyGradient, make_objective
from iwopd.algo.spans import UNSCORED, Spans, cut_spans
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch

LENGTHS = st.lists(st.integers(0, 4), max_size=8)


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The byte lengths of two tokenisations of one text; some tokens have no bytes."""
    total = draw(st.integers(1, 12))
    found = []
    for _ in range(2):
        ends = [*sorted(draw(st.lists(st.integers(0, total), max_size=8))), total]
        found.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return found[0], found[1]


@given(two_cuts())
def test_spans_are_cut_where_both_cut_and_nowhere_else(cuts: tuple[list[int], list[int]]) -> None:
    ours, theirs = cuts
    of_ours, of_theirs = cut_spans(ours, theirs)
    ends = [{sum(lengths[: place + 1]) for place in range(len(lengths))} for lengths in cuts]
    wanted = sorted((ends[0] & ends[1]) - {0})
    for spans, lengths in ((of_ours, ours), (of_theirs, theirs)):
        assert spans == sorted(spans)
        assert set(spans) == set(range(len(wanted)))  # each side has tokens in every span, and each token one span
        sizes = [sum(length for span, length in zip(spans, lengths, strict=True) if span == n) for n in range(len(wanted))]
        assert sizes == [end - start for start, end in zip([0, *wanted], wanted, strict=False)]


def test_texts_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the same bytes, got 3 and 4"):
        cut_spans([1, 2], [4])


def evidence(spans: list[list[int]], *, seed: int = 0, mask: torch.Tensor | None = None) -> Evidence:
    """Random log-probs; the teacher's stand on the last token of each span."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(spans)
    old = -torch.rand(numbers.shape, generator=generator) * 3
    teacher = torch.zeros_like(old)
    for row, line in enumerate(spans):
        for span in set(line) - {UNSCORED}:
            last = max(place for place, one in enumerate(line) if one == span)
            teacher[row, last] = -float(torch.rand(1, generator=generator)) * 5
    inside = numbers >= 0 if mask is None else mask
    return Evidence(teacher, old, inside, old * 0.5, 0.3, spans=numbers)


def by_hand(found: Evidence) -> Evidence:
    """The same by span, in plain Python."""
    assert found.spans is not None
    assert found.reference_logprobs is not None
    width = int(found.spans.max()) + 1
    sums = {name: torch.zeros(len(found.spans), width) for name in ("teacher_logprobs", "old_logprobs", "reference_logprobs")}
    mask = torch.zeros(len(found.spans), width, dtype=torch.bool)
    for row, line in enumerate(found.spans.tolist()):
        for place, span in enumerate(line):
            if span != UNSCORED:
                mask[row, span] = True
                for name, values in sums.items():
                    values[row, span] += getattr(found, name)[row, place]
    return Evidence(mask=mask, progress=found.progress, **sums)


SPANS = [[0, 0, 1, 2, 2, 2, UNSCORED, 3], [0, UNSCORED, 1, 1, UNSCORED, UNSCORED, UNSCORED, UNSCORED]]


@pytest.mark.parametrize("rule", ["uniform", "cumulative-share", "signed", "ideal", "prefix-only", "curriculum", "survival"])
@pytest.mark.parametrize("advantage", ["opd", "exopd", "clipped", "log-mix"])
def test_rules_and_advantages_see_spans_and_tokens_get_what_their_span_gets(rule: str, advantage: str) -> None:
    objective = make_objective({"weights": rule, "advantage": advantage})
    found = objective.signal(evidence(SPANS))
    wanted = objective.signal(by_hand(evidence(SPANS)))
    for row, line in enumerate(SPANS):
        for place, span in enumerate(line):
            for name in ("gap", "weights", "advantages", "supervised"):
                value = 0.0 if span == UNSCORED else float(getattr(wanted, name)[row, span])
                assert float(getattr(found, name)[row, place]) == pytest.approx(value, abs=1e-6), (name, row, place)
            assert bool(found.mask[row, place]) == (span != UNSCORED)
    assert found.of_spans is not None
    assert torch.equal(found.of_spans.mask, wanted.mask)


def test_spans_of_one_token_are_tokens_bit_for_bit() -> None:
    alone = [[0, 1, 2, 3, 4], [0, 1, 2, UNSCORED, UNSCORED]]
    given_ = evidence(alone, seed=3)
    plain = Evidence(given_.teacher_logprobs, given_.old_logprobs, given_.mask, given_.reference_logprobs, given_.progress)
    objective = PolicyGradient(weights="cumulative-share")
    found, wanted = objective.signal(given_), objective.signal(plain)
    for name in ("mask", "gap", "weights", "advantages", "supervised"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert wanted.of_spans is None


def test_a_span_that_is_partly_masked_does_not_count() -> None:
    mask = torch.tensor(SPANS) >= 0
    mask[0, 4] = False  # in the middle of span 2
    found = PolicyGradient().signal(evidence(SPANS, mask=mask))
    assert found.mask[0].tolist() == [True, True, True, False, False, False, False, True]
    assert not found.advantages[0, 3:6].any()


def test_the_gradient_is_that_of_the_span() -> None:
    """The sum of the tokens' gradients is the gradient of the span's log-prob times its advantage."""
    given_ = evidence([[0, 0, 1, UNSCORED]])
    objective = PolicyGradient()
    signal = objective.signal(given_)
    logprobs = given_.old_logprobs.clone().requires_grad_()
    columns = {name: values[given_.mask | ~given_.mask] for name, values in objective.columns(given_, signal).items()}
    objective.logprobs_loss(logprobs.reshape(-1), columns, denominator=3).loss.backward()
    gaps = by_hand(given_).gap[0]
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-float(gaps[0]) / 3] * 2 + [-float(gaps[1]) / 3, 0.0], abs=1e-6)


def test_what_compares_distributions_is_refused() -> None:
    given_ = evidence(SPANS)
    with pytest.raises(ValueError, match="kl compares distributions over the ids of two tokenizers"):
        Spans.of(given_.spans, given_.mask).compress(
            Evidence(given_.teacher_logprobs, given_.old_logprobs, given_.mask, kl=given_.mask.float())
        )  # type: ignore[arg-type]


def scored(spans: list[int] | None, tokens: int = 3) -> ScoredRollout:
    rollout = Rollout(Prompt("p", (1,)), torch.arange(tokens), torch.zeros(tokens), "length")
    return ScoredRollout(
        rollout, torch.zeros(tokens), torch.zeros(tokens), spans=None if spans is None else torch.tensor(spans)
    )


def test_a_batch_joins_rollouts_of_teachers_of_both_kinds() -> None:
    batch = TokenBatch.collate([scored([0, 0, UNSCORED]), scored(None)])
    assert batch.spans is not None
    assert batch.spans.tolist() == [0, 0, UNSCORED, 0, 1, 2]
    assert TokenBatch.collate([scored(None)]).spans is None
    with pytest.raises(ValueError, match="spans has 2 rows for 3 tokens"):
        scored([0, 1])


def test_sums_are_those_of_long_spans_in_double_precision() -> None:
    rng = random.Random(0)
    values = [rng.uniform(-30, 0) for _ in range(4096)]
    spans = Spans.of(torch.zeros(1, 4096, dtype=torch.long), torch.ones(1, 4096, dtype=torch.bool))
    assert float(spans.sum(torch.tensor([values]))[0, 0]) == pytest.approx(
        sum(torch.tensor(values).double().tolist()), rel=1e-6
    )
    assert algo.spans.UNSCORED == -1

"""The divergence over a few ids and the rest, against float64 autograd of formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.views import NO_ID
from written_divergences import KINDS, REAL, VOCAB, all_logprobs, assert_same, batch, leaves_of, support, written_out

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.mix}")
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"vocab_size": REAL}, {"temperature": 1.7, "vocab_size": REAL}]


@pytest.fixture(params=[3, 10_000], ids=["chunks of three rows", "one chunk"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.algo.head.CHUNK_ELEMENTS_CPU", 2 * request.param * VOCAB)
    monkeypatch.setattr("iwopd.algo.head.COLUMNS_CPU", 11 if request.param == 3 else 2**14)
    monkeypatch.setattr("iwopd.algo.row_divergences.BLOCK_ELEMENTS_CPU", 21 if request.param == 3 else 2**17)


def merged(logprobs: Tensor, ids: Tensor) -> Tensor:
    """[n, V + 1]: log-probs of ids in the support, -inf of others, and last the log-prob of these together."""
    chosen = torch.zeros(len(ids), logprobs.shape[1] + 1, dtype=torch.bool)
    chosen = chosen.scatter_(1, torch.where(ids == NO_ID, logprobs.shape[1], ids), True)[:, :-1]
    rest = logprobs.masked_fill(chosen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.masked_fill(~chosen, -1e3), rest], -1)


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("k", "empty"), [(5, 0.0), (6, 0.5), (3, 1.0)])
def test_top_k_is_exact(kind: DivergenceKind, options: dict[str, Any], k: int, empty: float) -> None:
    data = batch(2, 7)
    given = support(data, k, empty, **options)
    leaves, other = leaves_of(data), leaves_of(data)
    student = {name: value for name, value in {**data, **leaves}.items() if not name.startswith("teacher")}
    ours = algo.fused_top_k_loss(**student, **given, kind=kind, denominator=5.0, **options)
    ids = given["ids"][data["mask"]]
    log_p, log_q = (
        merged(all_logprobs({**data, **other}, **options), ids),
        merged(all_logprobs(data, "teacher_", **options), ids),
    )
    there = log_q > -500  # the written formula has no place for ids that are not there
    values = torch.stack([written_out(kind, one[at], two[at]) for one, two, at in zip(log_p, log_q, there, strict=True)])
    assert_same(ours, leaves, values, other, data)


@every_kind
def test_a_support_of_the_whole_vocabulary_is_the_full_divergence(kind: DivergenceKind) -> None:
    data = batch(3, 4)
    given = support(data, REAL, vocab_size=REAL)
    given["rest"] = torch.full_like(given["rest"], -23.0)  # as `algo.views` reports a rest of nothing
    leaves, other = leaves_of(data), leaves_of(data)
    student = {name: value for name, value in {**data, **leaves}.items() if not name.startswith("teacher")}
    some = algo.fused_top_k_loss(**student, **given, kind=kind, denominator=5.0, vocab_size=REAL)
    whole = algo.fused_divergence_loss(**{**data, **other}, kind=kind, denominator=5.0, vocab_size=REAL)
    torch.testing.assert_close(some.values, whole.values, rtol=1e-6, atol=1e-7)
    for one, two in zip(
        *(torch.autograd.grad(x.loss, list(y.values())) for x, y in ((some, leaves), (whole, other))), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@every_kind
def test_top_k_of_a_small_rest_is_exact_in_float32(kind: DivergenceKind) -> None:
    """A student that is sure: its rest is 1e-9, of which one minus the rest of the probability would leave nothing."""
    weight = torch.tensor([[20.0], [19.0], [-1.5], [-2.0], [-3.0]])
    given = {
        "ids": torch.tensor([[1, NO_ID, 0]]),
        "logprobs": torch.tensor([[-2.0, 0.0, -0.3]]),
        "rest": torch.tensor([-5.1]),
        "weights": torch.ones(1),
        "mask": torch.ones(1, dtype=torch.bool),
    }
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = weight.to(dtype).requires_grad_()
        columns = {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}
        out = algo.fused_top_k_loss(torch.ones(1, 1, dtype=dtype), leaf, **columns, kind=kind, denominator=1)
        found.append((out.values, *torch.autograd.grad(out.loss, leaf)))
    for rounded, exact in zip(*found, strict=True):
        torch.testing.assert_close(rounded.double(), exact, rtol=1e-4, atol=1e-14)

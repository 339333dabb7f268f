"""The divergence over the full vocabulary from hidden states, against float64 autograd of formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.divergences import DivergenceKind
from written_divergences import KINDS, REAL, VOCAB, all_logprobs, assert_same, batch, leaves_of, written_out

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.mix}")
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"vocab_size": REAL}, {"temperature": 1.7, "vocab_size": REAL}]


@pytest.fixture(params=[3, 10_000], ids=["chunks of three rows", "one chunk"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.algo.head.CHUNK_ELEMENTS_CPU", 2 * request.param * VOCAB)
    monkeypatch.setattr("iwopd.algo.head.COLUMNS_CPU", 11 if request.param == 3 else 2**14)
    monkeypatch.setattr("iwopd.algo.row_divergences.BLOCK_ELEMENTS_CPU", 21 if request.param == 3 else 2**17)


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_full_vocabulary_is_exact(kind: DivergenceKind, options: dict[str, Any], with_bias: bool) -> None:
    data = batch(2, 7)
    if not with_bias:
        del data["bias"], data["teacher_bias"]
    leaves, other = leaves_of(data), leaves_of(data)
    ours = algo.fused_divergence_loss(**{**data, **leaves}, kind=kind, denominator=5.0, **options)
    naive = written_out(kind, all_logprobs({**data, **other}, **options), all_logprobs(data, "teacher_", **options))
    assert_same(ours, leaves, naive, other, data)


def test_the_teacher_gets_no_gradient() -> None:
    data = batch(3)
    everything = {name: value.clone().requires_grad_() if name != "mask" else value for name, value in data.items()}
    algo.fused_divergence_loss(**everything, kind=KINDS[0], denominator=5.0).loss.backward()
    assert {name for name, value in everything.items() if value.grad is not None} == {"hidden", "weight", "bias"}


@every_kind
def test_per_token_values_and_their_gradients_are_exact(kind: DivergenceKind) -> None:
    data = batch(9)
    leaves, other = leaves_of(data), leaves_of(data)
    arguments = {**data, **leaves}
    weights, mask = arguments.pop("weights"), arguments.pop("mask")
    values = algo.token_divergence(**arguments, kind=kind, temperature=0.7)
    naive = written_out(kind, all_logprobs({**data, **other}, temperature=0.7), all_logprobs(data, "teacher_", temperature=0.7))
    torch.testing.assert_close(values[mask], naive)
    gradients = torch.autograd.grad((values[mask] * weights[mask]).sum(), list(leaves.values()))
    wanted = torch.autograd.grad((naive * weights[mask]).sum(), list(other.values()))
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want)


@every_kind
def test_full_vocabulary_passes_numerical_differentiation(kind: DivergenceKind) -> None:
    data = batch(4)
    data = {name: value.nan_to_num(0.0) if name != "mask" else value for name, value in data.items()}

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = {**data, "hidden": hidden, "weight": weight, "bias": bias}
        return algo.fused_divergence_loss(**given, kind=kind, denominator=3, temperature=0.8, vocab_size=REAL).loss

    torch.autograd.gradcheck(loss, tuple(leaves_of(data).values()), fast_mode=True)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_and_a_half_precision_teacher_are_close_to_float64(kind: DivergenceKind, dtype: torch.dtype) -> None:
    data = batch(64, dtype=torch.float32)
    data |= {name: value.to(dtype) for name, value in data.items() if name.startswith("teacher")}
    exact = {name: value.double() if name != "mask" else value for name, value in data.items()}
    results = []
    for given in (data, exact):
        leaves = leaves_of(given)
        out = algo.fused_divergence_loss(**{**given, **leaves}, kind=kind, denominator=64)
        results.append([out.loss, out.values, *torch.autograd.grad(out.loss, list(leaves.values()))])
    assert results[0][1].dtype == torch.float32
    for rounded, wanted in zip(*results, strict=True):
        torch.testing.assert_close(rounded.double(), wanted, rtol=1e-4, atol=1e-5)

"""Losses of divergences straight from hidden states, against float64 autograd of formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.views import NO_ID
from written_divergences import KINDS, draw, written_out

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.mix}")
VOCAB, REAL, HIDDEN, TEACHER_HIDDEN = 40, 33, 6, 9
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"vocab_size": REAL}, {"temperature": 1.7, "vocab_size": REAL}]


def batch(*shape: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Student and teacher at tokens [...], a third of them masked, with NaN there."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(9)) < 0.7
    if mask.numel():
        mask.view(-1)[0] = True
    nowhere = torch.where(mask, 0.0, torch.nan)
    made = {
        "hidden": draw(*shape, HIDDEN, seed=1) + nowhere[..., None],
        "weight": draw(VOCAB, HIDDEN, seed=2),
        "bias": draw(VOCAB, seed=3),
        "teacher_hidden": draw(*shape, TEACHER_HIDDEN, seed=4) + nowhere[..., None],
        "teacher_weight": draw(VOCAB, TEACHER_HIDDEN, seed=5),
        "teacher_bias": draw(VOCAB, seed=6),
        "weights": draw(*shape, seed=7) + nowhere,
    }
    return {**{name: value.to(dtype) for name, value in made.items()}, "mask": mask}


def all_logprobs(data: dict[str, Tensor], prefix: str = "", temperature: float = 1.0, vocab_size: int = VOCAB) -> Tensor:
    """[n, V] of the tokens inside the mask, the naive way."""
    logits = data[f"{prefix}hidden"][data["mask"]] @ data[f"{prefix}weight"].T
    bias = data.get(f"{prefix}bias")
    logits = logits if bias is None else logits + bias
    return (logits[..., :vocab_size] / temperature).log_softmax(-1)


def in_mask(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)


def leaves_of(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: data[name].clone().requires_grad_() for name in ("hidden", "weight", "bias") if name in data}


def assert_same(
    ours: algo.DivergenceLoss, leaves: dict[str, Tensor], values: Tensor, other: dict[str, Tensor], data: Any
) -> None:
    """Loss, values and gradients are those of the written-out `values` [n] of the tokens inside the mask."""
    mask = data["mask"]
    wanted = (values * data["weights"][mask]).sum() / 5.0
    torch.testing.assert_close(ours.loss, wanted)
    torch.testing.assert_close(ours.values, in_mask(values.detach(), mask))
    assert not ours.values.requires_grad
    expected = torch.autograd.grad(wanted, list(other.values()))
    for name, got, want in zip(leaves, torch.autograd.grad(ours.loss, list(leaves.values())), expected, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(params=[3, 10_000], ids=["chunks of three rows", "one chunk"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.algo.head.CHUNK_ELEMENTS_CPU", 2 * request.param * VOCAB)
    monkeypatch.setattr("iwopd.algo.head.COLUMNS_CPU", 11 if request.param == 3 else 2**14)
    monkeypatch.setattr("iwopd.algo.row_divergences.BLOCK_ELEMENTS_CPU", 21 if request.param == 3 else 2**17)


# --- the full vocabulary --------------------------------------------------------------------------------------------


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


# --- a few ids and the rest -----------------------------------------------------------------------------------------


def support(data: dict[str, Tensor], k: int, empty: float = 0.0, **options: Any) -> dict[str, Tensor]:
    """K distinct ids of each token in random order, what the teacher says of them, and of the rest; empty places among them."""
    log_q = all_logprobs(data, "teacher_", **options)
    ids = torch.rand(log_q.shape, generator=torch.Generator().manual_seed(11)).argsort(-1)[:, :k]
    filled = torch.rand(ids.shape, generator=torch.Generator().manual_seed(12)) >= empty
    chosen = torch.zeros_like(log_q, dtype=torch.bool).scatter_(1, ids, filled)
    mask = data["mask"]

    def spread(values: Tensor, outside: float) -> Tensor:
        whole = torch.full((*mask.shape, *values.shape[1:]), outside, dtype=values.dtype)
        whole[mask] = values
        return whole

    return {
        "ids": spread(torch.where(filled, ids, NO_ID), 7),
        "logprobs": spread(torch.where(filled, log_q.gather(1, ids), torch.nan), torch.nan),
        "rest": spread(log_q.masked_fill(chosen, -torch.inf).logsumexp(-1), torch.nan),
    }


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

"""What both losses of divergences keep, over the full vocabulary and over a few ids: splits, padding, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.views import NO_ID
from largest import Largest
from written_divergences import KINDS, REAL, VOCAB, all_logprobs, batch, leaves_of, support, written_out

Tensors = dict[str, Tensor]
Loss = Callable[..., algo.DivergenceLoss]
KIND = DivergenceKind("jsd", 0.3)


both = pytest.mark.parametrize("loss", [algo.fused_divergence_loss, algo.fused_top_k_loss], ids=["full", "top-k"])


def given_to(loss: Loss, data: Tensors) -> Tensors:
    """The data as the loss takes it: the teacher's states, or what it thinks of six ids."""
    if loss is algo.fused_divergence_loss:
        return data
    return {name: value for name, value in data.items() if not name.startswith("teacher")} | support(data, 6, 0.2)


@both
def test_any_split_into_micro_batches_adds_up(loss: Loss) -> None:
    data = given_to(loss, batch(6, 5))
    by_token = [name for name in data if data[name].shape[:1] == (6,)]
    found = []
    for rows_of_parts in ([[0, 1, 2, 3, 4, 5]], [[4], [0, 3], [1], [5, 2]]):
        leaves = leaves_of(data)
        losses = []
        for rows in rows_of_parts:
            part = {**data, **leaves}
            part |= {name: part[name][rows] for name in by_token}
            losses.append(loss(**part, kind=KIND, denominator=7.0).loss)
        total = torch.stack(losses).sum()
        found.append([total.detach(), *torch.autograd.grad(total, list(leaves.values()))])
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many, one)


@both
def test_a_second_backward_pass_gives_the_same_again(loss: Loss) -> None:
    leaves = leaves_of(data := batch(5))
    out = loss(**{**given_to(loss, data), **leaves}, kind=KIND, denominator=7.0)
    first = torch.autograd.grad(out.loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(2.0 * out.loss, list(leaves.values()))
    for one, two in zip(first, second, strict=True):
        assert one.any()
        assert torch.equal(2.0 * one, two)


@both
def test_padding_gets_no_gradient_and_nobody_gets_one_that_was_not_asked_for(loss: Loss) -> None:
    data = batch(2, 7)
    hidden = data["hidden"].clone().requires_grad_()
    loss(**{**given_to(loss, data), "hidden": hidden}, kind=KIND, denominator=7.0).loss.backward()
    assert hidden.grad is not None
    assert hidden.grad[data["mask"]].any(-1).all()
    assert not hidden.grad[~data["mask"]].any()
    with torch.no_grad():
        assert not loss(**{**given_to(loss, data), "hidden": hidden}, kind=KIND, denominator=7.0).loss.requires_grad


@both
def test_without_tokens_the_loss_is_zero(loss: Loss) -> None:
    for data in ({**batch(3), "mask": torch.zeros(3, dtype=torch.bool)}, batch(0)):
        leaves = leaves_of(data)
        out = loss(**{**given_to(loss, data), **leaves}, kind=KIND, denominator=7.0)
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0
        assert out.values.shape == data["mask"].shape
        assert not any(leaf.grad is None or leaf.grad.any() for leaf in leaves.values())


@both
@given(shape=st.lists(st.integers(0, 4), max_size=3).map(tuple), kind=st.sampled_from(KINDS))
def test_tokens_may_have_any_shape(loss: Loss, shape: tuple[int, ...], kind: DivergenceKind) -> None:
    data = batch(*shape)
    out = loss(**given_to(loss, data), kind=kind, denominator=7.0)
    assert out.values.shape == shape
    if loss is algo.fused_divergence_loss:
        inside = written_out(kind, all_logprobs(data), all_logprobs(data, "teacher_"))
        torch.testing.assert_close(out.values[data["mask"]], inside)


@both
def test_no_tensor_is_as_large_as_all_logits(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thirty tokens: nothing larger than two chunks of two tokens each, or the output matrix."""
    monkeypatch.setattr("iwopd.algo.head.CHUNK_ELEMENTS_CPU", 4 * VOCAB)
    data = batch(40)
    rows = int(data["mask"].sum())
    given, leaves = given_to(loss, data), leaves_of(data)
    with Largest() as largest:
        loss(**{**given, **leaves}, kind=KIND, denominator=7.0).loss.backward()
    assert 2 * VOCAB <= largest.elements <= max(40 * 9, VOCAB * 9) < rows * VOCAB / 2


@both
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.mix}")
def test_banned_ids_give_numbers(loss: Loss, kind: DivergenceKind) -> None:
    """-inf in both biases is a smaller vocabulary; in one alone, a bounded divergence."""
    data = batch(2, 7)
    banned = torch.arange(VOCAB) >= REAL
    found = []
    for names in (("bias", "teacher_bias"), ("bias",), ("teacher_bias",)):
        changed = {**data, **{name: data[name].masked_fill(banned, -torch.inf) for name in names}}
        leaves = leaves_of(changed)
        out = loss(**{**given_to(loss, changed), **leaves}, kind=kind, denominator=7.0)
        out.loss.backward()
        found.append(out.values[data["mask"]])
        assert bool(torch.isfinite(found[-1]).all())
        assert all(leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) for leaf in leaves.values())
    assert float(max(values.max() for values in found)) < 101
    if loss is algo.fused_divergence_loss:
        cut = loss(**data, kind=kind, denominator=7.0, vocab_size=REAL).values[data["mask"]]
        torch.testing.assert_close(found[0], cut)
        assert bool((found[1] != cut).all())


@both
def test_equal_models_have_no_divergence_and_no_gradient(loss: Loss) -> None:
    data = batch(2, 7)
    same = {**data, **{f"teacher_{name}": data[name] for name in ("hidden", "weight", "bias")}}
    for kind in KINDS:
        leaves = leaves_of(same)
        out = loss(**{**given_to(loss, same), **leaves}, kind=kind, denominator=7.0)
        out.loss.backward()
        assert float(out.values.abs().max()) < 1e-13
        assert all(leaf.grad is not None and float(leaf.grad.abs().max()) < 1e-13 for leaf in leaves.values())


def test_autocast_does_not_lower_the_precision() -> None:
    data, results = batch(9, dtype=torch.float32), []
    for enabled in (False, True):
        leaves = leaves_of(data)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = algo.fused_divergence_loss(**{**data, **leaves}, kind=KIND, denominator=7.0)
            results.append([out.values, *torch.autograd.grad(out.loss, list(leaves.values()))])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("name", "called"), [("hidden", "the hidden state"), ("teacher_hidden", "the teacher's hidden state")])
def test_a_broken_hidden_state_is_named(name: str, called: str) -> None:
    data = batch(2, 7)
    row, token = (int(i) for i in data["mask"].nonzero()[-1])
    data[name][row, token, 2] = torch.nan
    with pytest.raises(algo.NonFiniteError, match=f"{called} is nan at row {row}, token {token}"):
        algo.fused_divergence_loss(**data, kind=KIND, denominator=7.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_weight": torch.zeros(REAL, 9), "teacher_bias": None}, "teacher 33: pass vocab_size"),
        ({"teacher_hidden": torch.zeros(2, 6, 9)}, r"student has tokens \[2, 7\], teacher \[2, 6\]"),
        ({"mask": torch.ones(2, 6, dtype=torch.bool)}, r"hidden \[2, 7, 6\] must be the mask's shape \[2, 6\] plus \[H\]"),
        ({"weights": torch.ones(2, 6)}, r"weights has shape \[2, 6\], the mask \[2, 7\]"),
        ({"weights": torch.full((2, 7), torch.inf)}, "weights is inf at row 0, token 0"),
        ({"denominator": 0.0}, "denominator must be positive, got 0.0"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algo.fused_divergence_loss(**{**batch(2, 7), "kind": KIND, "denominator": 7.0, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([[3, 4, 3], [1, 2, 0]])}, "id 3 stands twice in the support of token 0; give each id once"),
        ({"ids": torch.tensor([[3, 4, 40], [1, 2, 0]])}, r"a support holds ids 0..40; the vocabulary ends at 39"),
        ({"ids": torch.tensor([[3, 4, -2], [1, 2, 0]])}, r"a support holds ids -2..4; the vocabulary ends at 39"),
        (
            {"ids": torch.tensor([[3, 4], [1, 2]])},
            r"ids \[2, 2\] and logprobs \[2, 3\] must be the mask's shape \[2\] plus \[K\]",
        ),
        ({"logprobs": torch.full((2, 3), torch.nan)}, "the teacher's log-probs is nan"),
        ({"rest": torch.tensor([0.0, torch.nan])}, r"rest is nan at index \[1\]"),
    ],
)
def test_bad_supports_are_named(change: dict[str, Any], message: str) -> None:
    support = {"ids": torch.tensor([[3, 4, NO_ID], [1, NO_ID, NO_ID]]), "logprobs": torch.zeros(2, 3), "rest": torch.zeros(2)}
    student = {"hidden": torch.zeros(2, 6), "weight": torch.zeros(VOCAB, 6), "weights": torch.ones(2)}
    student["mask"] = torch.ones(2, dtype=torch.bool)
    algo.fused_top_k_loss(**student, **support, kind=KIND, denominator=1)  # an empty place may stand twice
    with pytest.raises(ValueError, match=message):
        algo.fused_top_k_loss(**{**student, **support, **change}, kind=KIND, denominator=1)


def test_ids_must_be_integers() -> None:
    data = batch(3)
    student = {name: value for name, value in data.items() if not name.startswith("teacher")}
    with pytest.raises(TypeError, match=r"ids must be integers, got torch\.float64"):
        algo.fused_top_k_loss(
            **student, ids=torch.zeros(3, 1).double(), logprobs=torch.zeros(3, 1), rest=torch.zeros(3), kind=KIND, denominator=1
        )

"""Divergences as their papers write them, with nothing of the package's formulas, and data to compare on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.views import NO_ID

KINDS = [
    DivergenceKind("reverse-kl"),
    DivergenceKind("forward-kl"),
    DivergenceKind("jsd", 0.0),
    DivergenceKind("jsd", 0.3),
    DivergenceKind("jsd", 1.0),
    DivergenceKind("skew-reverse-kl", 0.2),
    DivergenceKind("skew-forward-kl", 0.0),
    DivergenceKind("skew-forward-kl", 0.7),
]


VOCAB, REAL, HIDDEN, TEACHER_HIDDEN = 40, 33, 6, 9


def written_out(kind: DivergenceKind, log_p: Tensor, log_q: Tensor) -> Tensor:
    """[...] from log-probs [..., V], as in the papers. Nothing of the package's formulas."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    def mixed(a: Tensor, b: Tensor, share: float) -> Tensor:
        return (share * a.exp() + (1 - share) * b.exp()).log()

    mix = kind.mix
    if kind.name == "reverse-kl" or (kind.name == "jsd" and mix == 1):
        return kl(log_p, log_q)
    if kind.name == "forward-kl" or (kind.name == "jsd" and mix == 0):
        return kl(log_q, log_p)
    assert mix is not None
    if kind.name == "jsd":
        m = mixed(log_q, log_p, mix)
        return mix * kl(log_q, m) + (1 - mix) * kl(log_p, m)
    if kind.name == "skew-reverse-kl":
        return kl(log_p, mixed(log_p, log_q, mix))
    return kl(log_q, mixed(log_q, log_p, mix))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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
        torch.testing.assert_close(got, want, msg=name)


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

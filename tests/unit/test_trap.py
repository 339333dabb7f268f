"""The trap: a divergence used as an *advantage* teaches nothing.

Policy gradients multiply `grad log p(y)` of the sampled token y by an advantage. A divergence D of whole distributions,
full-vocabulary or top-k, is the same number whichever token was drawn. And a number that does not depend on y is a baseline:
`E_y[-D grad log p(y)] = -D sum_y p(y) grad log p(y) = -D grad sum_y p(y) = -D grad 1 = 0`. The loss falls or rises, the
batch's gradient is noise, and its mean is nothing at all.

Two forms are right. D itself can be differentiated. Or, for the reverse KL, the gap `a(y) = log q(y) - log p(y)` is the
advantage, with the KL as what it is then good for, a baseline (`a + KL`, since `E_y[a] = -KL`):
`E_y[(a(y) + KL) grad log p(y)] = -grad KL(p || q)`, of less variance than with the gap alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.divergences import DivergenceKind
from written_divergences import KINDS, batch, support

VOCAB, K = 40, 6


def student() -> tuple[Tensor, dict[str, Tensor]]:
    """Output matrix [V, H] with gradients, and one token of student and teacher."""
    data = batch(1)
    return data["weight"].requires_grad_(), data


def logprobs(data: dict[str, Tensor], side: str = "") -> Tensor:
    """[V] of the one token."""
    logits = data[f"{side}hidden"] @ data[f"{side}weight"].T + data[f"{side}bias"]
    return logits.log_softmax(-1)[0]


def expected_step(advantage: Callable[[int], Tensor]) -> Tensor:
    """`E_y[advantage(y) grad log p(y)]` by the output matrix, exact: every token of the vocabulary in its turn."""
    weight, data = student()
    log_p = logprobs(data)
    total = torch.zeros_like(weight)
    for token in range(VOCAB):
        (gradient,) = torch.autograd.grad(log_p[token], weight, retain_graph=True)
        total += log_p[token].detach().exp() * advantage(token) * gradient
    return total


def divergence(kind: DivergenceKind, which: str) -> tuple[Tensor, Tensor]:
    """D [] of the one token, and its gradient by the output matrix."""
    weight, data = student()
    if which == "full":
        out = algo.fused_divergence_loss(**data, kind=kind, denominator=1.0)
    else:
        own = {name: value for name, value in data.items() if not name.startswith("teacher")}
        out = algo.fused_top_k_loss(**own, **support(data, K), kind=kind, denominator=1.0)
    (gradient,) = torch.autograd.grad(out.loss / data["weights"][0], weight)
    return out.values[0], gradient


@pytest.mark.parametrize("which", ["full", "top-k"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.mix}")
def test_a_divergence_as_an_advantage_has_no_expected_gradient_but_differentiated_it_has(
    kind: DivergenceKind, which: str
) -> None:
    value, gradient = divergence(kind, which)
    assert float(value) > 0.01
    nothing = expected_step(lambda token: -value)
    assert float(nothing.abs().max()) < 1e-14 < 1e-3 < float(gradient.abs().max())


def test_the_gap_with_the_kl_as_its_baseline_has_the_gradient_of_the_reverse_kl() -> None:
    _, data = student()
    gap = (logprobs(data, "teacher_") - logprobs(data)).detach()
    kl, gradient = divergence(DivergenceKind("reverse-kl"), "full")
    torch.testing.assert_close((logprobs(data).exp().detach() * gap).sum(), -kl)  # the expectation that the baseline removes
    for baseline in (0.0, float(kl)):
        torch.testing.assert_close(expected_step(lambda token, baseline=baseline: gap[token] + baseline), -gradient)

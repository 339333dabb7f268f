"""The likelihood of answers that somebody else wrote: cross-entropy, the loss of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from iwopd.algo._checks import check_tokens
from iwopd.algo.logprobs import token_logprobs
from iwopd.algo.objectives.base import LossAndMeans, TokenMeans, TokenStates


@dataclass(frozen=True)
class Likelihood:
    """`-lp[t]`, summed over the supervised tokens and divided by the denominator.

    The gradient by every log-prob is the same: there is no ratio, no clip and no weight. It is no objective for answers of the
    student itself: over them the expectation of its gradient is 0.
    """

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> LossAndMeans:
        taught = student.take(columns["supervised"])
        logprobs = token_logprobs(
            taught.hidden,
            taught.weight,
            taught.targets,
            bias=taught.bias,
            temperature=taught.temperature,
            vocab_size=taught.vocab_size,
            precision=taught.precision,
        )
        return self._sum(logprobs, denominator)

    def logprobs_loss(self, logprobs: Tensor, columns: Mapping[str, Tensor], denominator: float) -> LossAndMeans:
        return self._sum(logprobs[columns["supervised"]], denominator)

    def _sum(self, logprobs: Tensor, denominator: float) -> LossAndMeans:
        """Of the supervised tokens."""
        check_tokens("logprobs", logprobs, torch.ones_like(logprobs, dtype=torch.bool))
        total = -logprobs.sum()
        count = torch.tensor(logprobs.numel(), device=logprobs.device)
        return LossAndMeans(total / denominator, TokenMeans(count, {"mean": total.detach()}))

    def no_stats(self) -> TokenMeans:
        return TokenMeans(torch.zeros(()), {"mean": torch.zeros(())})

"""Whole distributions instead of the sampled token: the divergence of student and teacher at every token the student wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from iwopd.algo.evidence import TEACHER_DISTRIBUTION, Evidence
from iwopd.algo.logprobs import token_kl
from iwopd.algo.objectives.base import LossAndMeans, Objective, TokenMeans, TokenStates, TrainingSignal, setting


@dataclass(frozen=True, kw_only=True)
class Divergence(Objective):
    """Mean over tokens of `w[t] D_t`, differentiated through the student's distribution; prefixes are given (semi-gradient).

    With uniform weights the gradient of the reverse KL is the expectation of OPD's over the next token, without the noise of
    drawing it. `A_t = -D_t` used as an advantage of the sampled token would have no expected gradient at all.
    """

    name: ClassVar[str] = "divergence"
    title: ClassVar[str] = "Full-vocabulary divergence"
    formula: ClassVar[str] = "mean of w D_t,  D_t = KL(student || teacher) or KL(teacher || student)"
    source: ClassVar[str] = "the local D_t of Appendix A.3, trained on itself; weights as in Eq. 13"

    divergence: Literal["reverse-kl", "forward-kl"] = setting("reverse-kl", "which KL: of the student to the teacher, or back")

    @property
    def needs(self) -> frozenset[str]:
        """The teacher's distributions; its log-probs of the sampled tokens are for the weights."""
        return super().needs | {TEACHER_DISTRIBUTION}

    @property
    def needs_output_matrix(self) -> str | None:
        """A divergence looks at the whole distribution."""
        return f"method.objective = {self.name!r}"

    def direction(self, evidence: Evidence, weights: Tensor) -> Tensor:
        """The single-sample estimate: the weighted gap [B, T]."""
        return evidence.gap * weights

    def columns(self, evidence: Evidence, signal: TrainingSignal) -> dict[str, Tensor]:
        return {"supervised": signal.supervised, "weights": signal.weights}

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> LossAndMeans:
        if teacher is None:
            raise ValueError(f"objective {self.name!r} needs the teacher's hidden states")
        rows = columns["supervised"].nonzero().squeeze(1)  # once: every use of a mask would make the host wait
        values = token_kl(
            student.hidden[rows],
            student.weight,
            teacher.hidden[rows],
            teacher.weight,
            direction="reverse" if self.divergence == "reverse-kl" else "forward",
            bias=student.bias,
            teacher_bias=teacher.bias,
            temperature=student.temperature,
            vocab_size=student.vocab_size,
            precision=student.precision,
        )
        loss = (values * columns["weights"][rows].to(values.dtype)).sum() / denominator
        return LossAndMeans(loss, TokenMeans(columns["supervised"].sum(), {"mean": values.detach().sum()}))

    def no_stats(self) -> TokenMeans:
        return TokenMeans(torch.zeros(()), {"mean": torch.zeros(())})

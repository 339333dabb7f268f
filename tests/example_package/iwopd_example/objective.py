"""An objective: make the student's log-probs of its own tokens those of the teacher, in the mean square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import LossAndMeans, Objective, TokenMeans, TokenStates, TrainingSignal, setting


@dataclass(frozen=True, kw_only=True)
class LogProbMatching(Objective):
    name: ClassVar[str] = "log-prob-matching"
    title: ClassVar[str] = "Log-prob matching"
    formula: ClassVar[str] = "mean of strength / 2 * w (lp - lp_T)^2"
    source: ClassVar[str] = "an example"

    strength: float = setting(1.0, "factor of the loss")

    def __post_init__(self) -> None:
        if not self.strength > 0:
            raise ValueError(f"strength must be positive, got {self.strength}")

    def direction(self, evidence: Evidence, weights: Tensor) -> Tensor:
        return self.strength * evidence.gap * weights

    def columns(self, evidence: Evidence, signal: TrainingSignal) -> dict[str, Tensor]:
        teacher = algo.floor_logprobs(evidence.teacher_logprobs, evidence.mask).logprobs
        return {"supervised": signal.supervised, "weights": signal.weights, "teacher_logprobs": teacher}

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> LossAndMeans:
        logprobs = algo.token_logprobs(
            student.hidden,
            student.weight,
            student.targets,
            bias=student.bias,
            temperature=student.temperature,
            vocab_size=student.vocab_size,
        )
        return self.logprobs_loss(logprobs, columns, denominator)

    def logprobs_loss(self, logprobs: Tensor, columns: Mapping[str, Tensor], denominator: float) -> LossAndMeans:
        supervised = columns["supervised"]
        distance = (logprobs - columns["teacher_logprobs"])[supervised].square()
        loss = 0.5 * self.strength * (columns["weights"][supervised] * distance).sum() / denominator
        return LossAndMeans(loss, TokenMeans(supervised.sum(), {"square": distance.detach().sum()}))

    def no_stats(self) -> TokenMeans:
        return TokenMeans(torch.zeros(()), {"square": torch.zeros(())})

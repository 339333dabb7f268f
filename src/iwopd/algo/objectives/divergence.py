"""Whole distributions instead of the sampled token: the divergence of student and teacher at every token the student wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from iwopd.algo.asking import Support
from iwopd.algo.divergences import DIVERGENCES, DivergenceKind
from iwopd.algo.evidence import SUPPORT, TEACHER_DISTRIBUTION, Evidence
from iwopd.algo.fused_divergence import fused_divergence_loss, fused_top_k_loss
from iwopd.algo.objectives.base import (
    LossAndMeans,
    Objective,
    TokenMeans,
    TokenStates,
    TrainingSignal,
    setting,
)

K = 64
"""Likeliest ids of a top-k support, by default."""


@dataclass(frozen=True, kw_only=True)
class Divergence(Objective):
    """Mean over tokens of `w[t] D_t`, differentiated through the student's distribution; prefixes are given (semi-gradient).

    With uniform weights the gradient of the reverse KL is the expectation of OPD's over the next token, without the noise of
    drawing it. `A_t = -D_t` used as an advantage of the sampled token would have no expected gradient at all.
    """

    name: ClassVar[str] = "divergence"
    title: ClassVar[str] = "Divergence of whole distributions"
    formula: ClassVar[str] = "mean of w D_t,  D_t of student p and teacher q: " + ";  ".join(
        f"{name}: {one.formula}" for name, one in DIVERGENCES.items()
    )
    source: ClassVar[str] = "the local D_t of Appendix A.3 (Eq. 53), trained on itself; weights as in Eq. 11; GKD; DistiLLM"

    of_the_method: ClassVar[tuple[str, ...]] = ("divergence", "support", "k", "support_of", "beta", "alpha")
    conditions: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {
        "k": ("support", ("top-k",)),
        "support_of": ("support", ("top-k",)),
        **{
            parameter: ("divergence", tuple(name for name, one in DIVERGENCES.items() if one.parameter == parameter))
            for parameter in ("beta", "alpha")
        },
    }

    divergence: Literal["reverse-kl", "forward-kl", "jsd", "skew-reverse-kl", "skew-forward-kl"] = setting(
        "reverse-kl", "which D: see `iwopd methods`"
    )
    support: Literal["full", "top-k"] = setting("full", "over all ids, or over the k likeliest and one bucket for the rest")
    k: int = setting(K, "of 'top-k': ids of one token")
    support_of: Literal["teacher", "student", "union"] = setting("teacher", "of 'top-k': whose likeliest ids; union: of both")
    beta: float = setting(DIVERGENCES["jsd"].default, "of 'jsd': the teacher's share of the mixture, in [0, 1]")
    alpha: float = setting(
        DIVERGENCES["skew-reverse-kl"].default,
        "of skewed KLs: share of the first distribution in the second, in [0, 1)",
    )

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}: it is the number of likeliest ids of a token")
        _ = self.kind

    @cached_property
    def kind(self) -> DivergenceKind:
        parameter = DIVERGENCES[self.divergence].parameter
        return DivergenceKind(self.divergence, None if parameter is None else getattr(self, parameter))

    @property
    def needs(self) -> frozenset[str]:
        """The teacher's distributions; its log-probs of the sampled tokens are for the weights."""
        return super().needs | {TEACHER_DISTRIBUTION if self.support == "full" else SUPPORT}

    @property
    def compared_ids(self) -> Support | None:
        return Support(self.k, self.support_of) if self.support == "top-k" else None

    @property
    def needs_output_matrix(self) -> str | None:
        """A divergence looks at the whole distribution."""
        return f"method.objective = {self.name!r}"

    def direction(self, evidence: Evidence, weights: Tensor) -> Tensor:
        """The single-sample estimate: the weighted gap [B, T]."""
        return evidence.gap * weights

    def columns(self, evidence: Evidence, signal: TrainingSignal) -> dict[str, Tensor]:
        found = {"supervised": signal.supervised, "weights": signal.weights}
        if self.support == "full":
            return found
        names = ("support_ids", "support_logprobs", "support_rest")
        return found | evidence.select(names, f"objective {self.name!r} with support 'top-k'")

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> LossAndMeans:
        if self.support == "full" and teacher is None:
            raise ValueError(f"objective {self.name!r} needs the teacher's hidden states")
        weights, supervised = columns["weights"], columns["supervised"]
        options: dict[str, Any] = {
            "kind": self.kind,
            "denominator": denominator,
            "bias": student.bias,
            "temperature": student.temperature,
            "vocab_size": student.vocab_size,
            "precision": student.precision,
        }
        if teacher is None or self.support == "top-k":
            taught = (columns["support_ids"], columns["support_logprobs"], columns["support_rest"])
            out = fused_top_k_loss(student.hidden, student.weight, *taught, weights, supervised, **options)
        else:
            states = (student.hidden, student.weight, teacher.hidden, teacher.weight)
            out = fused_divergence_loss(*states, weights, supervised, teacher_bias=teacher.bias, **options)
        return LossAndMeans(out.loss, TokenMeans(supervised.sum(), {"mean": out.values.sum()}))

    def no_stats(self) -> TokenMeans:
        return TokenMeans(torch.zeros(()), {"mean": torch.zeros(())})

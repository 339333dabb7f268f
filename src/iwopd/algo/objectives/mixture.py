"""Two objectives in one step: one for the student's own answers, one for answers that others wrote (`rollout.mix`).

    loss = (sum over own tokens of the objective + coefficient * sum over others' tokens of theirs) / denominator

The denominator counts the supervised tokens of both, so the gradient does not depend on how the step is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from iwopd.algo.objectives.base import LossStats, Objective, ObjectiveLoss, TokenLoss, TokenStates
from iwopd.algo.objectives.divergence import Divergence
from iwopd.algo.objectives.likelihood import Likelihood

OTHERS = "others"
"""Name of the column [N], boolean: tokens that the student did not write."""

OF_OTHERS: Mapping[str, TokenLoss] = MappingProxyType(
    {"likelihood": Likelihood(), "forward-kl": Divergence(divergence="forward-kl")}
)
"""What answers of others are trained on, by name. A policy gradient is none: its ratio is to whoever wrote the answer."""


def needs_distributions(objective: TokenLoss) -> bool:
    """Whether the loss needs the teacher's whole distributions."""
    return isinstance(objective, Objective) and objective.needs_teacher_distribution


@dataclass(frozen=True)
class MixtureStats:
    """Statistics of both objectives; None of one that has seen no token."""

    own: LossStats | None
    others: LossStats | None

    @classmethod
    def merge(cls, parts: list[MixtureStats]) -> MixtureStats:
        def merged(found: list[LossStats]) -> LossStats | None:
            return type(found[0]).merge(found) if found else None

        own, others = [part.own for part in parts if part.own], [part.others for part in parts if part.others]
        return cls(merged(own), merged(others))

    def cpu(self) -> MixtureStats:
        return MixtureStats(self.own and self.own.cpu(), self.others and self.others.cpu())

    def as_dict(self) -> dict[str, float]:
        """Those of the student's own answers, as without a mixture."""
        return self.own.as_dict() if self.own else {}

    @property
    def others_mean(self) -> float:
        """Mean over the tokens of others of their loss, without the coefficient; 0 of nothing."""
        return self.others.as_dict()["mean"] if self.others else 0.0


@dataclass(frozen=True)
class MixtureLoss:
    loss: Tensor
    stats: MixtureStats


@dataclass(frozen=True)
class Mixture:
    """The loss of a step in which some answers are others'."""

    own: Objective
    others: TokenLoss
    coefficient: float = 1.0

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> MixtureLoss:
        """`teacher` has the states of all N tokens, or of those that `taught` names."""

        def part(objective: TokenLoss, rows: Tensor, given: Mapping[str, Tensor]) -> ObjectiveLoss:
            theirs = teacher
            if teacher is not None and len(teacher.hidden) == len(rows):
                theirs = teacher.take(rows)
            return objective.loss(student.take(rows), given, denominator, theirs)

        return self._sum(columns, part)

    def logprobs_loss(self, logprobs: Tensor, columns: Mapping[str, Tensor], denominator: float) -> MixtureLoss:
        return self._sum(columns, lambda objective, rows, given: objective.logprobs_loss(logprobs[rows], given, denominator))

    def taught(self, columns: Mapping[str, Tensor]) -> Tensor:
        """[N] boolean: the tokens of which the teacher's distributions are needed."""
        others = _of_others(columns)
        need = torch.tensor([needs_distributions(self.own), needs_distributions(self.others)], device=others.device)
        return need[others.long()]

    def _sum(
        self, columns: Mapping[str, Tensor], part: Callable[[TokenLoss, Tensor, Mapping[str, Tensor]], ObjectiveLoss]
    ) -> MixtureLoss:
        others = _of_others(columns)
        mine = theirs = None
        if not others.all():
            given = {name: values[~others] for name, values in columns.items() if name != OTHERS}
            mine = part(self.own, ~others, given)
        if others.any():
            supervised = columns["supervised"][others]
            # The weights of a rule are of the student's own answers.
            given = {"supervised": supervised, "weights": torch.ones_like(supervised, dtype=torch.float32)}
            theirs = part(self.others, others, given)
        if theirs is None:
            assert mine is not None  # a micro-batch has tokens
            return MixtureLoss(mine.loss, MixtureStats(mine.stats, None))
        loss = self.coefficient * theirs.loss
        if mine is None:
            return MixtureLoss(loss, MixtureStats(None, theirs.stats))
        return MixtureLoss(mine.loss + loss, MixtureStats(mine.stats, theirs.stats))

    def no_stats(self) -> MixtureStats:
        return MixtureStats(self.own.no_stats(), None)


def _of_others(columns: Mapping[str, Tensor]) -> Tensor:
    """[N]; a step without answers of others has no such column."""
    return columns.get(OTHERS, torch.zeros_like(columns["supervised"]))

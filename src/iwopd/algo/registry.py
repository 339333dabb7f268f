"""The registry of weight rules: built-in ones by decorator, other packages' ones by entry point (group `iwopd.weights`).

An entry point names a `WeightRule` or a plain function that asks for evidence by the names of its parameters:

    def half_life(gap, mask, *, tokens=100.0): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from iwopd.algo.evidence import Formula
from iwopd.registry import Registry

RuleFunction = Callable[..., Tensor]
POSITIVE: Literal["positive"] = "positive"
"""Of `WeightRule.supervised`: the tokens with a positive weight."""

FAMILIES = {
    "sums": (
        "Weights from sums of gaps",
        "IW-OPD gives a token more weight the less of the answer's discrepancy lies before it; plain OPD gives 1 everywhere.",
    ),
    "ideal": (
        "Ideal weights",
        "The prefix's importance ratio to the power of alpha over its mean. That mean is 1 everywhere: the median is drawn.",
    ),
    "position": ("Weights by position alone", "Rules that look at no gap, only at where a token is."),
    "evidence": (
        "Weights from more evidence",
        "Rules that look at entropies, whole distributions, likely ids or the rollout's verdict.",
    ),
    "other": ("Other rules", "Rules from plug-ins, with their defaults."),
}
"""Families of rules: title, and what they have in common. The report draws one chart for each."""


@dataclass(frozen=True)
class WeightRule(Formula):
    """A weight rule: its function takes evidence in float64 (`gap` [B, T], `mask` [B, T] bool, ...), returns weights [B, T]."""

    kind: ClassVar[str] = "weight rule"
    needs_progress: bool = False
    """The function takes `progress`. Follows from its parameters."""
    batch_dependent: bool = False
    """A rollout's weights depend on the other rollouts of the batch."""
    supervised: RuleFunction | Literal["positive"] | None = None
    """The tokens that count in the denominator. None: all valid ones; `POSITIVE`: those with a positive weight; or a function
    `(mask, **params) -> mask`."""
    title: str = ""
    family: str = "other"

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_progress", "progress" in self.needs)


WEIGHT_RULES: Registry[WeightRule] = Registry("weight rule", "iwopd.weights", WeightRule.adopt)


def register(
    name: str,
    *,
    title: str,
    family: str,
    formula: str,
    source: str,
    batch_dependent: bool = False,
    supervised: RuleFunction | Literal["positive"] | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the weight rule `name`."""

    def decorate(function: RuleFunction) -> RuleFunction:
        rule = WeightRule(
            name, function, formula, source, batch_dependent=batch_dependent, supervised=supervised, title=title, family=family
        )
        WEIGHT_RULES.add(name, rule)
        return function

    return decorate

"""Objectives: from evidence to the loss. `base` says what one is; each has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iwopd.algo.advantages import ADVANTAGES
from iwopd.algo.objectives.base import (
    LossAndMeans,
    LossStats,
    Objective,
    ObjectiveLoss,
    Setting,
    TokenLoss,
    TokenMeans,
    TokenStates,
    TrainingSignal,
    setting,
)
from iwopd.algo.objectives.divergence import Divergence
from iwopd.algo.objectives.likelihood import Likelihood
from iwopd.algo.objectives.mixture import OF_OTHERS, OTHERS, Mixture, MixtureStats, needs_distributions
from iwopd.algo.objectives.policy_gradient import PolicyGradient
from iwopd.registry import Registry, suggestion

__all__ = [
    "OBJECTIVES",
    "OF_OTHERS",
    "OTHERS",
    "Divergence",
    "Likelihood",
    "LossAndMeans",
    "LossStats",
    "Mixture",
    "MixtureStats",
    "Objective",
    "ObjectiveLoss",
    "PolicyGradient",
    "Setting",
    "TokenLoss",
    "TokenMeans",
    "TokenStates",
    "TrainingSignal",
    "UnknownSettingError",
    "make_objective",
    "needs_distributions",
    "objective_class",
    "setting",
]

DEFAULT = PolicyGradient.name


def _adopt(name: str, loaded: Any, where: str) -> type[Objective]:
    if not (isinstance(loaded, type) and issubclass(loaded, Objective)):
        raise TypeError(f"must be a subclass of iwopd.algo.objectives.Objective, got {loaded!r}")
    return loaded


OBJECTIVES: Registry[type[Objective]] = Registry("objective", "iwopd.objectives", _adopt)
OBJECTIVES.add(PolicyGradient.name, PolicyGradient)
OBJECTIVES.add(Divergence.name, Divergence)


def objective_class(values: Mapping[str, Any]) -> type[Objective]:
    """The class that a `[method]` section names."""
    return OBJECTIVES[values.get("objective", DEFAULT)]


class UnknownSettingError(ValueError):
    """A setting that no objective has."""

    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"there is no setting {name!r}{hint}")
        self.setting = name


def make_objective(values: Mapping[str, Any]) -> Objective:
    """The objective that a `[method]` section describes; a setting that it does not use is refused."""
    chosen = objective_class(values)
    given = {name: value for name, value in values.items() if name != "objective"}
    known = chosen.settings(given)
    for name in given:
        if name not in known:
            raise ValueError(_unused(name, chosen, given, list(known)))
    made = chosen.build(given)
    made.check()
    return made


def _unused(name: str, chosen: type[Objective], given: Mapping[str, Any], known: list[str]) -> str:
    """Says whose setting it is, if it is anybody's."""
    owners = [f"objective {one!r}" for one in OBJECTIVES if one != chosen.name and name in OBJECTIVES[one].settings({})]
    for one in OBJECTIVES:
        if name in (conditions := OBJECTIVES[one].conditions):
            choice, values = conditions[name]
            owners.append(f"objective {one!r} with {choice} = {' or '.join(map(repr, values))}")
    owners += [f"advantage {one!r}" for one in ADVANTAGES if name in ADVANTAGES[one].params]
    if not owners:
        raise UnknownSettingError(name, suggestion(name, ["objective", *known]))
    used = f"objective {chosen.name!r}" + (f" with advantage {given.get('advantage', 'opd')!r}" if "advantage" in known else "")
    if name in chosen.conditions:
        choice = chosen.conditions[name][0]
        used += f" with {choice} = {given.get(choice, chosen.every_setting()[choice].default)!r}"
    return f"{name} is not used by {used}: it belongs to {' and '.join(owners)}. Leave it out, or choose that"

"""The registry of weight rules: built-in ones by decorator, other packages' ones by entry point.

A package adds a rule with an entry point in the group `iwopd.weights` whose value is a `WeightRule` or a plain function
`(gap, mask, ...) -> weights` whose further parameters have defaults:

    [project.entry-points."iwopd.weights"]
    half-life = "my_package.rules:half_life"

Names are known at once; the code behind an entry point is imported when its rule is first asked for, so a broken
plug-in harms only those who use it, and they are told.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import Tensor

ENTRY_POINT_GROUP = "iwopd.weights"
RuleFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class WeightRule:
    """A weight rule: its function, what it says in one line, and what the caller must know before calling it."""

    name: str
    function: RuleFunction
    """`(gap [B, T] float64, mask [B, T] bool, **params) -> weights [B, T]`."""
    formula: str = ""
    source: str = ""
    """Where it comes from: equation, table or figure."""
    needs_progress: bool = False
    """The function takes `progress`, the share of training done."""
    batch_dependent: bool = False
    """A rollout's weights depend on the other rollouts of the batch."""
    supervised: RuleFunction | None = None
    """`(mask, **params) -> mask` of the tokens that count in the denominator; None: all valid ones."""

    @property
    def params(self) -> dict[str, Any]:
        """The rule's own parameters and their defaults, from the function's signature."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        own = list(inspect.signature(self.function).parameters.items())[2:]  # after gap and mask
        return {name: given.default for name, given in own if given.kind in named and name != "progress"}

    def check_params(self, params: Mapping[str, object]) -> None:
        """Refuse parameters that the rule does not have, and name those that it has."""
        known = [*self.params, "normalize"]
        for name in params:
            if name not in known:
                raise ValueError(f"weight rule {self.name!r} has no parameter {name!r}{_hint(name, known)}")


class WeightRules(Mapping[str, WeightRule]):
    """All rules by name. Built-in names cannot be taken over by a plug-in."""

    def __init__(self) -> None:
        self._rules: dict[str, WeightRule] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def add(self, rule: WeightRule) -> None:
        if rule.name in self._rules:
            raise ValueError(f"weight rule {rule.name!r} is registered already")
        self._rules[rule.name] = rule

    def __getitem__(self, name: str) -> WeightRule:
        if name not in self._rules:
            plugin = self._found_plugins().get(name)
            if plugin is None:
                raise UnknownRuleError(f"unknown weight rule {name!r}{_hint(name, list(self))}")
            self._rules[name] = _load(plugin)
        return self._rules[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rules or name in self._found_plugins()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._rules, *self._found_plugins()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _found_plugins(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            self._plugins = {}
            for entry in entry_points(group=ENTRY_POINT_GROUP):
                if entry.name in self._rules or entry.name in self._plugins:
                    warnings.warn(f"weight rule {entry.name!r} of {entry.value} is ignored: the name is taken", stacklevel=3)
                else:
                    self._plugins[entry.name] = entry
        return self._plugins


class UnknownRuleError(KeyError, ValueError):
    """No weight rule of that name. A KeyError so that mappings behave, a ValueError because it is a bad argument."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return str(self.args[0])


WEIGHT_RULES = WeightRules()


def register(
    name: str,
    *,
    formula: str,
    source: str,
    needs_progress: bool = False,
    batch_dependent: bool = False,
    supervised: RuleFunction | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the weight rule `name`."""

    def decorate(function: RuleFunction) -> RuleFunction:
        WEIGHT_RULES.add(WeightRule(name, function, formula, source, needs_progress, batch_dependent, supervised))
        return function

    return decorate


def _load(entry: EntryPoint) -> WeightRule:
    try:
        loaded = entry.load()
    except Exception as error:
        raise ImportError(f"weight rule {entry.name!r} could not be loaded from {entry.value}: {error!r}") from error
    if isinstance(loaded, WeightRule):
        return replace(loaded, name=entry.name)
    if not callable(loaded):
        raise TypeError(f"weight rule {entry.name!r} ({entry.value}) must be a WeightRule or a function, got {loaded!r}")
    given = inspect.signature(loaded).parameters
    needs_progress = "progress" in given
    for name, parameter in list(given.items())[2:]:
        if name != "progress" and parameter.default is inspect.Parameter.empty:
            raise TypeError(f"weight rule {entry.name!r} ({entry.value}): its parameter {name!r} needs a default")
    summary = (inspect.getdoc(loaded) or "").partition("\n")[0]
    return WeightRule(entry.name, loaded, formula=summary, source=entry.value, needs_progress=needs_progress)


def _hint(name: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(name, choices, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{guess} choices: {', '.join(choices)}"

"""Registries: things found by name, built-in ones by decorator, those of other packages by entry point.

Weight rules, advantages, objectives, rollout engines, answer checkers and trackers all work this way. A package adds one with
an entry point in the registry's group:

    [project.entry-points."iwopd.weights"]
    half-life = "my_package.rules:half_life"

The code of an entry point is imported when it is first asked for, so a broken plug-in harms only those who use it.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Adopt = Callable[[str, Any, str], Item]
"""Makes an item of what an entry point names: `(name, the loaded object, where it came from)`. Refuses with a TypeError."""


class UnknownNameError(KeyError, ValueError):
    """Nothing of that name. A KeyError so that mappings behave, a ValueError because it is a bad argument."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return str(self.args[0])


class Registry(Mapping[str, Item], Generic[Item]):
    """All items of one kind by name. A plug-in cannot take a built-in name."""

    def __init__(self, kind: str, group: str, adopt: Adopt[Item]) -> None:
        """`kind` is what messages call an item ("weight rule"), `group` the group of entry points."""
        self.kind, self.group, self._adopt = kind, group, adopt
        self._items: dict[str, Item] = {}
        self._declared: dict[str, EntryPoint] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def add(self, name: str, item: Item) -> None:
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._items[name] = item

    def declare(self, name: str, where: str) -> None:
        """Add a built-in item by its place (`package.module:name`); it is imported when it is first asked for."""
        if name in self._items or name in self._declared:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._declared[name] = EntryPoint(name, where, self.group)

    def __getitem__(self, name: str) -> Item:
        if name not in self._items:
            entry = self._declared.get(name) or self._found_plugins().get(name)
            if entry is None:
                raise UnknownNameError(f"unknown {self.kind} {name!r}{suggestion(name, list(self))}")
            self._items[name] = self._load(entry)
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items or name in self._declared or name in self._found_plugins()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._declared, *self._items, *self._found_plugins()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() would ask for the length

    def _found_plugins(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            self._plugins = {}
            for entry in entry_points(group=self.group):
                if entry.name in self._items or entry.name in self._declared or entry.name in self._plugins:
                    warnings.warn(f"{self.kind} {entry.name!r} of {entry.value} is ignored: the name is taken", stacklevel=3)
                else:
                    self._plugins[entry.name] = entry
        return self._plugins

    def _load(self, entry: EntryPoint) -> Item:
        try:
            loaded = entry.load()
        except Exception as error:
            raise ImportError(f"{self.kind} {entry.name!r} could not be loaded from {entry.value}: {error!r}") from error
        try:
            return self._adopt(entry.name, loaded, entry.value)
        except TypeError as error:
            raise TypeError(f"{self.kind} {entry.name!r} ({entry.value}): {error}") from None


def suggestion(name: str, choices: Sequence[str]) -> str:
    """The end of an error message: the nearest right name, and all names."""
    near = difflib.get_close_matches(name, choices, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{guess} choices: {', '.join(choices)}"

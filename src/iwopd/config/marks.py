"""Marks on settings (`section.Place`, `section.Repeat`): which of them do not make a run another run, or another method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from iwopd.config.reading import flatten
from iwopd.config.tree import Config
from iwopd.section import Section, has_mark

Name = tuple[str, ...]


def marked(*marks: str, section: type[Section] = Config) -> list[str]:
    """Dotted names of the settings with one of these marks. A marked section is one name; `*` is any key or list entry."""
    return [".".join(name) for name, info in _fields(section) if has_mark(info, *marks)]


def without(tree: Mapping[str, Any], *marks: str) -> dict[str, Any]:
    """A plain tree, validated or not, without the settings that have one of these marks."""
    pruned: dict[str, Any] = _prune(tree, [tuple(name.split(".")) for name in marked(*marks)])
    return pruned


def defaults() -> dict[str, Any]:
    """The plain tree of all defaults; settings that are empty by default are left out."""
    tree: dict[str, Any] = {}
    for (*sections, last), info in _fields(Config):
        value = info.get_default(call_default_factory=True)
        if "*" not in sections and not info.is_required() and value is not None and not isinstance(value, Section):
            inner = tree
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = list(value) if isinstance(value, tuple) else value
    return tree


def differences(old: Config, new: Config, *marks: str) -> dict[str, tuple[Any, Any]]:
    """Dotted name: (old, new) of every setting in which two trees differ, apart from settings with these marks."""
    before, after = (dict(flatten(without(config.model_dump(mode="json"), *marks))) for config in (old, new))
    names = {**before, **after}
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _fields(section: type[Section], prefix: Name = ()) -> Iterator[tuple[Name, FieldInfo]]:
    """Every field, the sections themselves included."""
    for name, info in section.model_fields.items():
        yield (*prefix, name), info
        for inner, path in _sections(info.annotation):
            yield from _fields(inner, (*prefix, name, *path))
    for name, inner in section.plugged_in().items():
        yield from _fields(inner, (*prefix, name))


def _sections(annotation: Any) -> Iterator[tuple[type[Section], Name]]:
    """The sections in an annotation, with `*` for the key of a dictionary or the place in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ()
    step: Name = ("*",) if get_origin(annotation) in (dict, list, tuple) else ()
    for part in get_args(annotation):
        for section, path in _sections(part):
            yield section, (*step, *path)


def _prune(value: Any, names: list[Name]) -> Any:
    if isinstance(value, list):
        return [_prune(one, [name[1:] for name in names if name[:1] == ("*",)]) for one in value]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, inner in value.items():
        below = [name[1:] for name in names if name and name[0] in (key, "*")]
        pruned = _prune(inner, below)
        emptied = not pruned and isinstance(inner, Mapping) and inner  # a section of which nothing is left goes, too
        if () not in below and not emptied:
            kept[key] = pruned
    return kept

"""Compares a verl with what we use of it (`reaches.py`): `python -m iwopd.cluster.verl.compatibility [FOLDER]`.

FOLDER holds the package `verl`, for instance one that `pip install --no-deps --target FOLDER verl==X` made; without it the
installed one is compared. verl is read, not imported: that takes a second, and neither Ray nor a GPU nor the other version's
own dependencies. Prints one line for each difference; exit code 1 if there are any.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from iwopd.cluster.verl import reaches
from iwopd.cluster.verl.errors import VerlError

Found = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


class Source:
    """The source of one verl. `folder` is the package itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def version(self) -> str:
        return (self.folder / "version" / "version").read_text(encoding="utf-8").strip()

    @cache  # noqa: B019  # one or two of them in a process
    def text(self, path: str) -> str | None:
        """A file below the package; None if there is none."""
        file = self.folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    @cache  # noqa: B019
    def module(self, name: str) -> ast.Module | None:
        """By its dotted name."""
        path = "/".join(name.split(".")[1:])
        text = self.text(f"{path}/__init__.py" if path else "__init__.py")
        text = self.text(f"{path}.py") if text is None and path else text
        return None if text is None else ast.parse(text)

    def find(self, name: str) -> tuple[Found, str] | None:
        """The definition behind a dotted name, through re-exports, and the text of its module."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:length])
            if (tree := self.module(module)) is not None:
                first, *inner = parts[length:]
                return self._bound(module, tree, first, inner)
        return None

    def _bound(self, module: str, tree: ast.Module, name: str, inner: list[str]) -> tuple[Found, str] | None:
        if (found := _defined(tree.body, name)) is not None:
            for part in inner:
                found = _defined(found.body, part) if isinstance(found, ast.ClassDef) else None
            return None if found is None else (found, self._text_of(module))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                aliases = {alias.asname or alias.name: alias.name for alias in node.names}
                if original := aliases.get(name) or ("*" in aliases and name):
                    target = ".".join([self._origin(module, node), original, *inner])
                    if (behind := self.find(target)) is not None:
                        return behind
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.text("/".join([*module.split(".")[1:], "__init__.py"])) is not None
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _text_of(self, module: str) -> str:
        path = "/".join(module.split(".")[1:])
        return self.text(f"{path}/__init__.py" if path else "__init__.py") or self.text(f"{path}.py") or ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All of verl's settings for PPO with their defaults, by dotted name; tables as well."""
        tree = yaml.safe_load(self.text("trainer/config/_generated_ppo_trainer.yaml") or "{}")
        return dict(flat(tree))


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """All entries of a tree of settings by dotted name, tables included."""
    for key, value in tree.items():
        yield f"{above}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")


def _defined(body: list[ast.stmt], name: str) -> Found | None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return node
    return None


def signature(found: Found) -> str:
    """Parameters of a function with their defaults; bases and fields of a class; `=` for a variable."""
    if isinstance(found, ast.ClassDef):
        fields = [
            node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        return f"({', '.join(ast.unparse(base) for base in found.bases)}) {' '.join(fields)}".rstrip()
    if isinstance(found, ast.Assign | ast.AnnAssign):
        return "="
    plain = ast.parse(ast.unparse(found)).body[0]
    assert isinstance(plain, ast.FunctionDef | ast.AsyncFunctionDef)
    for argument in ast.walk(plain.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"{'async ' * isinstance(found, ast.AsyncFunctionDef)}({ast.unparse(plain.args)})"


def body(found: Found, text: str) -> str:
    """A digest of the definition, without comments on lines of their own and blank lines."""
    lines = (ast.get_source_segment(text, found) or "").splitlines()
    kept = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return sha256("\n".join(kept).encode()).hexdigest()[:8]


def installed() -> Source:
    """The verl that would be imported here."""
    folders = getattr(importlib.util.find_spec("verl"), "submodule_search_locations", None)
    if not folders:
        raise VerlError("verl is not installed: pip install 'iwopd[verl]', or name a folder that holds the package")
    return Source(Path(folders[0]))


def differences(source: Source) -> list[str]:
    """What is otherwise than in the version that was tested, one line each."""
    return [*_names(source), *_settings(source), *_texts(source)]


def in_short(find: Callable[[], Source]) -> str:
    """The same in one sentence, for an error; also where the source cannot be read."""
    try:
        found = differences(find())
    except (VerlError, OSError, SyntaxError, ValueError) as error:
        return f"What differs is not known: {error}"
    if not found:
        return "Nothing that we use of it looks different, but nothing was run with it"
    return f"Of what we use of it {len(found)} things differ, first of all: {found[0]}"


def _names(source: Source) -> Iterator[str]:
    for name, reach in reaches.NAMES.items():
        if (found := source.find(name)) is None:
            yield f"{name} is gone ({reach.why})"
            continue
        node, text = found
        if (now := signature(node)) != reach.signature:
            yield f"{name} has other parameters or fields: {now}, was {reach.signature} ({reach.why})"
        if reach.body and (digest := body(node, text)) != reach.body:
            yield f"{name} computes something else: read it, then note {digest!r} instead of {reach.body!r} ({reach.why})"


def _settings(source: Source) -> Iterator[str]:
    known = source.settings
    for name in reaches.SETTINGS:
        if name not in known:
            yield f"the setting {name} is gone (we set it)"
    for name in reaches.ADDED:
        if name in known:
            yield f"the setting {name} exists now, default {known[name]!r} (we add it with '+', which Hydra then refuses)"


def _texts(source: Source) -> Iterator[str]:
    for path, fragments in reaches.TEXTS.items():
        text = source.text(path)
        for fragment, why in fragments.items():
            if text is None or fragment not in text:
                yield f"verl/{path} {'is gone' if text is None else f'no longer has {fragment!r}'} ({why})"


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) / "verl" if arguments else None
    if folder is not None and not folder.is_dir():
        print(f"iwopd: {folder} is no folder: name one that holds the package verl", file=sys.stderr)
        return 2
    source = Source(folder) if folder else installed()
    found = differences(source)
    count = len(reaches.NAMES) + len(reaches.SETTINGS) + len(reaches.ADDED) + sum(map(len, reaches.TEXTS.values()))
    for line in found:
        print(line)
    print(f"verl {source.version} against {reaches.VERL}: {len(found)} differences in {count} things that we use")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

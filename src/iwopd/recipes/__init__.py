"""The recipes that come with the package, by name: `tiny/iw-opd` is `tiny/iw-opd.toml` in this folder.

Each folder has a README with its commands and what they reached. A recipe's first line is a comment that says what it is.
"""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """All of them, the small ones first."""
    order = ("tiny", "mix", "paper")
    found = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.glob("*/*.toml"))
    return [path.as_posix() for path in sorted(found, key=lambda path: (order.index(path.parts[0]), path.name))]


def about(name: str) -> str:
    """The first sentence of its first line."""
    first = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ").partition(". ")[0].rstrip(".")


def find(word: str | Path) -> Path:
    """The recipe that a user means: a file, as it is; else one of the package, by its name with or without `.toml`."""
    path = Path(word)
    named = FOLDER / path.with_name(f"{path.name.removesuffix('.toml')}.toml") if path.name else path
    inside = not path.is_absolute() and ".." not in path.parts and len(path.parts) == 2
    return named if inside and not path.exists() and named.is_file() else path


def title(path: Path) -> str:
    """What a user calls a recipe: those of the package by their name, others by their path."""
    return path.relative_to(FOLDER).with_suffix("").as_posix() if path.is_relative_to(FOLDER) else str(path)


def nearby(word: str) -> list[str]:
    """Names that look like this one."""
    known = names()
    return difflib.get_close_matches(word.removesuffix(".toml"), known, n=3) or [name for name in known if word in name][:3]

"""List the recipes that come with the package, show one, or copy them. Wherever a command takes a recipe, it also takes a name
of this list: `iwopd train tiny/iw-opd`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import groupby
from pathlib import Path

from iwopd import recipes
from iwopd.commands.options import named_path
from iwopd.errors import UserError

HELP = "list the recipes of the package, show or copy them"
EPILOG = """\
examples
  iwopd recipes                                 all names
  iwopd recipes tiny                            what the README of a folder says: commands and results
  iwopd recipes tiny/iw-opd                     the recipe itself
  iwopd recipes tiny/iw-opd --copy my.toml      to change it
  iwopd recipes paper --copy paper              a folder of them
"""


class RecipeError(UserError, ValueError):
    """No such recipe, or no place for it."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a recipe or a folder (default: list everything)")
    parser.add_argument(
        "--copy", type=named_path, metavar="TO", help="copy the recipe to this file, or the folder to this folder"
    )
    parser.add_argument("--json", action="store_true", help="list as one JSON object")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    name: str | None = options.name
    chosen = _chosen(name)
    if options.copy is not None:
        _copy(name, chosen, options.copy)
    elif options.json:
        print(json.dumps({one: {"about": recipes.about(one), "file": str(recipes.find(one))} for one in chosen}, indent=1))
    elif name is None:
        _list(chosen)
    else:
        source = recipes.find(name) if chosen == [_plain(name)] else recipes.FOLDER / _plain(name) / "README.md"
        print(source.read_text(encoding="utf-8"), end="")
    return 0


def _plain(name: str) -> str:
    return name.removesuffix(".toml").strip("/")


def _chosen(name: str | None) -> list[str]:
    """One recipe, those of a folder, or all."""
    known = recipes.names()
    if name is None:
        return known
    plain = _plain(name)
    chosen = [plain] if plain in known else [one for one in known if one.startswith(f"{plain}/")]
    if not chosen:
        near = recipes.nearby(name)
        remedy = f"did you mean {' or '.join(near)}?" if near else "`iwopd recipes` lists them"
        raise RecipeError(f"the package has no recipe {name!r}; {remedy}")
    return chosen


def _list(chosen: list[str]) -> None:
    for folder, found in groupby(chosen, key=lambda one: one.partition("/")[0]):
        inside = list(found)
        print(f"{folder}/    (iwopd recipes {folder}: commands and results)")
        for name in inside:
            print(f"  {name:<26} {recipes.about(name)}" if len(name) <= 26 else f"  {name}\n{'':29}{recipes.about(name)}")
        print()
    print("Train with one: iwopd train tiny/iw-opd. Change one: iwopd recipes tiny/iw-opd --copy my.toml")


def _copy(name: str | None, chosen: list[str], target: Path) -> None:
    """A recipe to a file; a folder, or all folders, with their READMEs. Nothing is overwritten."""
    single = name is not None and chosen == [_plain(name)]
    if single:
        path = target / f"{Path(chosen[0]).name}.toml" if target.is_dir() else target
        files = {recipes.find(chosen[0]): path}
    else:
        root = recipes.FOLDER if name is None else recipes.FOLDER / _plain(name)
        sources = [path for path in root.rglob("*") if path.suffix in (".toml", ".md")]
        files = {path: target / path.relative_to(root) for path in sources}
    if taken := [path for path in files.values() if path.exists()]:
        raise RecipeError(f"{taken[0]} exists already: name another place with --copy, or remove it")
    for source, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    print(f"{path}: change it, then `iwopd train {path}`" if single else f"{len(chosen)} recipes in {target}")

"""CONTRIBUTING's table of rooms is true: nobody imports what it does not allow, and no two rooms import each other.

Every import in `src/` counts: at the top of a module, inside a function, and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "iwopd"
HEADER = "| room (`src/iwopd/…`) | lives here | may import |"

PRIVATE = "a private module"

Table = dict[str, set[str]]
"""Rooms by name (`eval`, `cluster/verl`, `lm`), and the rooms that each may import."""


def read_table(text: str) -> Table:
    """The table: names in backticks, `all` and `all above`. Names that are no rooms (torch) are not ours to check."""
    lines = text[text.index(HEADER) :].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _until_blank(lines)]
    shared = set(_names(_sentence(text)))
    table: Table = {}
    for row in rows:
        rooms = _names(row[0])
        words = re.sub(r"`[^`]*`", "", row[2])
        above = set(table) if re.search(r"\ball above\b", words) else set()
        for room in rooms:
            assert room not in table, f"{room} stands twice in the table"
            table[room] = above | shared | set(_names(row[2]))
            if re.search(r"\ball\b(?! above)", words):
                table[room].add("*")
    everything = set(table)
    for room, allowed in table.items():
        assert allowed <= everything | {"*"}, f"{room} may import {sorted(allowed - everything)}, which is no room of the table"
        table[room] = (everything if "*" in allowed else allowed) - {room}
    return table


def _until_blank(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def _sentence(text: str) -> str:
    found = re.search(r"Every room may import ([^.]*(?:\.py[^.]*)*)\.\s", text)
    return found[1] if found else ""


def _names(cell: str) -> list[str]:
    return [name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w./]+)`", cell)]


def room_of(module: str, table: Mapping[str, object]) -> str | None:
    """The room of a module (`eval/sandbox/run`): the longest name in the table that begins it."""
    parts = module.split("/")
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in table), None)


def imports(path: Path, source: Path = SOURCE) -> Iterator[tuple[int, str]]:
    """Line and module (`eval/task`) of everything of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(["iwopd", *path.relative_to(source).parts[: -node.level]]) if node.level else ""
            start = ".".join(part for part in (above, node.module) if part)
            targets = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            package, *parts = target.split(".")
            while parts and not ((source / "/".join(parts)).is_dir() or (source / ("/".join(parts) + ".py")).is_file()):
                parts.pop()  # a name in a module
            if package == "iwopd" and parts:
                yield node.lineno, "/".join(parts)


def edges(table: Table, source: Path = SOURCE) -> dict[tuple[str, str], list[str]]:
    """Who imports whom, and where."""
    found = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source).with_suffix("").as_posix().removesuffix("/__init__")
        if module == "__init__" or any(name.startswith(f"{module}/") for name in table):  # a package of rooms
            continue
        room = room_of(module, table)
        assert room is not None, f"src/iwopd/{module}.py is in no room of the table"
        for line, target in imports(path, source):
            other = room_of(target, table)
            assert other is not None, f"{path}:{line} imports {target}, which is in no room of the table"
            where = f"{path.relative_to(source)}:{line}"
            if other != room and where not in found[room, other]:
                found[room, other].append(where)
            if other != room and "/_" in f"/{target}" and not target.startswith("__"):
                found[room, PRIVATE].append(f"{where} ({target})")
    return {pair: where for pair, where in found.items() if where}


def violations(table: Table, found: Mapping[tuple[str, str], list[str]]) -> list[str]:
    wrong = [f"{room} -> {other}: {', '.join(where)}" for (room, other), where in found.items() if other not in table[room]]
    wrong += [
        f"{room} <-> {' <-> '.join(others)}: a cycle ({'; '.join(found[pair][0] for pair in pairs)})"
        for room, others, pairs in cycles(found)
    ]
    return sorted(wrong)


def cycles(found: Mapping[tuple[str, str], list[str]]) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    """Groups of rooms that reach each other."""
    reach: dict[str, set[str]] = defaultdict(set)
    for room, other in found:
        reach[room].add(other)
    for middle in list(reach):  # Warshall's closure
        for room in list(reach):
            if middle in reach[room]:
                reach[room] |= reach[middle]
    seen: set[str] = set()
    for room in sorted(reach):
        others = sorted(other for other in reach[room] if other != room and room in reach[other])
        if others and room not in seen:
            seen.update(others)
            yield room, others, [pair for pair in found if set(pair) <= {room, *others}]


def test_the_table_of_rooms_is_true() -> None:
    table = read_table((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    wrong = violations(table, edges(table))
    assert not wrong, f"{len(wrong)} violations\n" + "\n".join(wrong)


def test_no_two_modules_import_each_other() -> None:
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        for line, target in imports(path):
            other = f"{target}/__init__" if (SOURCE / target).is_dir() else target
            if other != module:
                found[module, other].append(f"{module}.py:{line}")
    wrong = [f"{module} <-> {' <-> '.join(others)}" for module, others, _ in cycles(found)]
    assert not wrong, "\n".join(wrong)


EXAMPLE = f"""
{HEADER}
| --- | --- | --- |
| `errors.py` | errors | nothing |
| `types.py` | types | torch |
| `algo/`, `lm.py` | maths | `types` |
| `train/` | the loop | all above |
| `cluster/verl/` | cluster | `algo` |
| `cli.py` | commands | all |

Every room may import `errors.py`. More text about `train`.
"""


def test_the_reader_of_the_table() -> None:
    table = read_table(EXAMPLE)
    assert table["errors"] == set()
    assert table["algo"] == table["lm"] == {"errors", "types"}
    assert table["train"] == {"errors", "types", "algo", "lm"}
    assert table["cluster/verl"] == {"errors", "algo"}
    assert table["cli"] == {"errors", "types", "algo", "lm", "train", "cluster/verl"}


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    files = {
        "errors": "",
        "types": "",
        "cli": "",
        "algo/__init__": "from iwopd.types import Prompt\nfrom iwopd import errors",
        "algo/deep": "def f():\n    import iwopd.train.loop\n",
        "algo/_own": "",
        "algo/more": "from . import _own, deep\nfrom .deep import f\nfrom ..train import loop",
        "train/loop": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from iwopd.algo.deep import f\n",
        "lm": "from iwopd import algo, cli\nfrom iwopd.algo._own import f",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    table = read_table(EXAMPLE)
    found = edges(table, tmp_path)
    assert found["algo", "train"] == ["algo/deep.py:2", "algo/more.py:3"]
    assert found["train", "algo"] == ["train/loop.py:3"]
    assert violations(table, found) == [
        "algo -> train: algo/deep.py:2, algo/more.py:3",
        "algo <-> train: a cycle (algo/deep.py:2; train/loop.py:3)",
        "lm -> a private module: lm.py:2 (algo/_own)",
        "lm -> algo: lm.py:1, lm.py:2",
        "lm -> cli: lm.py:1",
    ]
    (tmp_path / "new.py").write_text("")
    with pytest.raises(AssertionError, match=r"new\.py is in no room"):
        edges(table, tmp_path)

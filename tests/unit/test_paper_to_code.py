"""docs/paper-to-code.md is whole, and what it names exists: links, functions, tests, settings, commands."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd import algo, cli, tiny
from iwopd.analysis.reproduce.items import ITEMS
from iwopd.commands.options import parse_overrides, words
from iwopd.config import load_config, parse_value
from iwopd.eval.catalog import find_task
from support import length_mask

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "paper-to-code.md"
TEXT = PAGE.read_text(encoding="utf-8")
EQUATIONS = 68
"""As the paper numbers them: 17 in the main text, the rest in the appendix."""
FIGURES = ("1a", "1b", "2a", "2b", "3a", "3b", "3c", "4a", "4b", "4c")
TABLES = 7
VERDICTS = ("reproduced", "half", "not reproduced", "too few to tell", "not run", "no counterpart", "see Tab.")

LINKS = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", TEXT)
NAMED = [(label[1:-1], target) for label, target in LINKS if label.startswith("`")]
SPANS = re.findall(r"`([^`]+)`", TEXT)
COMMANDS = [span for span in SPANS if span.startswith("iwopd ")]
SETTING = re.compile(r"(?:data|rollout|optim|eval|checkpoint|method)\.\w+ = ")
SETTINGS = [span for span in SPANS if SETTING.match(span)]
ROWS = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in TEXT.splitlines() if re.match(r"\| (?!---)", line)]
RECIPE = ROOT / "src" / "iwopd" / "recipes" / "paper" / "qwen3-4b-from-qwen3-30b-a3b-instruct-2507-iw-opd-math.toml"
EXOPD_RECIPE = RECIPE.with_name(RECIPE.name.replace("iw-opd", "iw-exopd"))


def numbers(listed: str) -> list[int]:
    """`19-23, 25` as numbers."""
    ends = [part.split("-") for part in listed.split(", ")]
    return [number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)]


def first_cells(pattern: str) -> list[str]:
    return [found for row in ROWS for found in re.findall(pattern, row[0])]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def setting(tree: dict[str, Any], name: str) -> Any:
    return reduce(lambda values, key: values[key], name.split("."), tree)


def test_every_equation_figure_and_table_has_one_row() -> None:
    listed = [number for found in first_cells(r"Eq\. (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)") for number in numbers(found)]
    assert sorted(listed) == list(range(1, EQUATIONS + 1))
    assert sorted(first_cells(r"Fig\. (\w+)")) == list(FIGURES)
    assert sorted(first_cells(r"Tab\. (\d+)")) == [str(number) for number in range(1, TABLES + 1)]
    assert sorted(first_cells(r"Proposition (\d)")) == ["1", "2"]
    assert first_cells(r"Algorithm (\d)") == ["1"]
    sections = ["A.1", "A.2", "A.3", "B", "C.1", "C.2", "C.3", "C.4", "D", "E"]
    assert first_cells(r"^([A-E](?:\.\d)?)(?:,|$)") == sections


def test_every_row_ends_with_a_verdict() -> None:
    rows = [row for row in ROWS if re.match(r"Eq\.|Fig\.|Tab\.|Proposition|Algorithm|[A-E](\.\d)?(,|$)", row[0])]
    assert len(rows) > 60
    for row in rows:
        assert row[-1].startswith(VERDICTS), row
    for row in rows:  # what was measured is said there alone
        if row[0].startswith("Fig."):
            assert re.search(r"see \[P\d+\]\(results\.md#p\d+-", row[-1]), row


def test_verdicts_are_those_of_the_results() -> None:
    """What two lineages show is no verdict, here as there."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| (P\d+) \| .* \| ([^|]+) \|$", results, flags=re.MULTILINE))
    assert len(told) == 10
    few = {item for item, verdict in told.items() if "too few" in verdict or "takes four" in verdict}
    assert few
    for row in ROWS:
        if row[0].startswith(("Fig.", "Tab.")):
            for said, listed in re.findall(
                r"(too few to tell|reproduced|half)[^;]*?see ((?:(?: and )?\[P\d+\]\([^)]*\))+)", row[-1]
            ):
                for item in re.findall(r"\[(P\d+)\]", listed):
                    assert (said == "too few to tell") == (item in few), f"{row[0]}: {said}, and {item} is: {told[item]}"


def test_every_link_leads_somewhere() -> None:
    assert len(LINKS) > 100
    for label, target in LINKS:
        path, _, anchor = target.partition("#")
        place = (PAGE.parent / path).resolve()
        assert place.is_file(), f"{label} links to {target}, and there is no such file"
        assert not anchor or anchor in anchors(place), f"{label}: {place.name} has no heading #{anchor}"
        if (item := re.fullmatch(r"P(\d+)", label)) is not None:
            assert anchor.startswith(f"p{item[1]}-")


@pytest.mark.parametrize(("named", "target"), sorted(set(NAMED)))
def test_every_function_and_test_exists(named: str, target: str) -> None:
    path, _, name = named.partition(":")
    assert name, f"{named} names a file without a function"
    if path.startswith("tests/"):
        assert target == f"../{path}"
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path} has no {name}"
    else:
        assert target == f"../src/iwopd/{path}"
        module = importlib.import_module("iwopd." + path.removesuffix(".py").replace("/", "."))
        reduce(getattr, name.split("."), module)


def test_code_that_looks_like_a_place_is_a_link() -> None:
    linked = {named for named, _ in NAMED}
    for span in SPANS:
        assert ".py" not in span or span in linked, f"`{span}` is not linked"


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options, rest = cli._parser().parse_known_args(shlex.split(command)[1:])
    if options.command in ("train", "plan"):
        load_config(Path(options.recipe), parse_overrides(rest))
    else:
        assert not rest
    check(options)


def check(options: argparse.Namespace) -> None:
    """What the parser lets through and the command itself would refuse."""
    if options.command == "reproduce":
        assert set(options.items) <= set(ITEMS)
    elif options.command == "probe":
        assert options.world in (None, *tiny.WORLDS)
        if options.task is not None:
            find_task(options.task)
    elif options.command == "eval":
        for task in words(options.tasks):
            find_task(task)
    else:
        assert options.command in ("train", "plan", "figures", "methods")


def test_every_phenomenon_has_its_command() -> None:
    named = {item for command in COMMANDS if command.startswith("iwopd reproduce") for item in command.split()[2:]}
    assert named == {f"p{number}" for number in range(1, 11)}


def test_recipes_of_table_6_hold_its_settings() -> None:
    tree = load_config(RECIPE).model_dump()
    (row,) = (row for row in ROWS if row[0] == "Tab. 6")
    listed = [span for span in re.findall(r"`([^`]+)`", " ".join(row)) if SETTING.match(span)]
    assert len(listed) > 15
    for span in listed:
        name, _, value = span.partition(" = ")
        assert setting(tree, name) == parse_value(value), span


def test_every_setting_is_accepted() -> None:
    assert len(SETTINGS) > 18
    for span in SETTINGS:
        name, _, value = span.partition(" = ")
        found = load_config(EXOPD_RECIPE, {name: parse_value(value)}).model_dump()
        assert setting(found, name) == parse_value(value)


def test_with_equal_gaps_the_share_is_a_straight_line() -> None:
    """The paper's "Limitations": where all tokens disagree alike, IW-OPD is linear decay."""
    mask = length_mask([1, 2, 7, 300])
    gap = torch.where(mask, -0.7, 0.0).double()
    share = algo.token_weights("cumulative-share", gap, mask, gamma=0.5)
    torch.testing.assert_close(share, algo.token_weights("linear-decay", gap, mask, gamma=0.5))

"""The pages hang together: links, anchors, navigation, commands, references. The site itself is built in tests/e2e."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from build_docs import FENCE, PAGES, with_site_links
from example_records import unpacked
from iwopd import cli
from iwopd.commands.options import USERS_KEYS, parse_overrides
from iwopd.config import settings
from iwopd.report import write_report
from reference_pages import API, reference_pages, subcommands

ROOT = Path(__file__).parents[2]
NAV_MADE = {f"docs/reference/{name}" for name in reference_pages()} | {"docs/tutorial.md"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\$ |[A-Z_]+=\S+ )*(?:\S*/)?(?:iwopd|(?:torchrun|accelerate launch) .*-m iwopd) (.*)$", re.MULTILINE)
PLACES = ("method.params", "data.chat_template_kwargs", "tracking", "reward", *USERS_KEYS)
"""Sections of which a user or a plug-in names the keys."""


def pages() -> list[Path]:
    """Everything that people read, by its place in the repository."""
    found = [*(ROOT / page for page in PAGES), *(ROOT / "docs").glob("*.md"), *ROOT.glob("**/recipes/*/README.md")]
    return sorted(page.relative_to(ROOT) for page in found if "build" not in page.relative_to(ROOT).parts)


@cache
def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def nav(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for value in values for page in nav(value)]


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        place = (ROOT / page.parent / target).resolve() if target else ROOT / page
        relative = place.relative_to(ROOT)
        if relative == Path("docs/example/report.html") or relative.as_posix() in NAV_MADE:
            continue  # made for the site
        assert place.exists(), f"{page} links to {link}: there is no such file"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(relative), f"{page} links to {link}: {place.name} has no such heading"


def test_the_navigation_has_every_page_and_nothing_else() -> None:
    listed = nav(tomllib.loads((ROOT / "docs" / "zensical.toml").read_text())["project"]["nav"])
    assert len(listed) == len(set(listed))
    written = {*PAGES, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
    assert set(listed) == written | NAV_MADE


def commands(page: Path) -> list[str]:
    """Command lines in blocks, without what continues a line."""
    blocks = [re.sub(r"\\\n\s*", "", found[0]) for found in FENCE.finditer(text_of(page))]
    return [words for block in blocks for words in COMMAND.findall(block)]


def mentions(page: Path) -> list[str]:
    """Commands in running text, which need not be whole: `iwopd eval --tasks`."""
    spans = re.findall(r"(?<!`)`(iwopd [^`\n]+)`(?!`)", FENCE.sub("", text_of(page)))
    return [words for span in spans for words in COMMAND.findall(span)]


def words_of(line: str) -> list[str]:
    return shlex.split(re.split(r"\s[;|>&]", line)[0], comments=True)


def parse(line: str) -> None:
    options, rest = cli._parser().parse_known_args(words_of(line))
    if options.command not in ("train", "doctor", "plan"):
        assert not rest, f"unknown argument {rest[0]!r}"
    for name in parse_overrides(rest):
        check_setting(name)


def check_mention(line: str) -> None:
    """The command exists, and so does every option that is named."""
    command, *words = words_of(line)
    if command == "COMMAND" or command.startswith("-"):
        return
    assert command in subcommands(), f"there is no command {command}"
    for word in words:
        name = word.split("=")[0]
        if name.startswith("--") and name not in subcommands()[command]._option_string_actions:
            assert command in ("train", "doctor", "plan"), f"iwopd {command} has no {name}"
            check_setting(name[2:].replace("-", "_"))


def check_setting(name: str) -> None:
    open_places = tuple(f"{place}." for place in PLACES)
    assert name in {known for known, _ in settings()} or name.startswith(open_places), f"there is no setting {name}"


@pytest.mark.parametrize("page", [page for page in pages() if page.name not in ("LOG.md", "CHANGELOG.md")], ids=str)
def test_every_command_is_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the real parser; nothing is run. LOG and CHANGELOG speak of commands as they were."""
    faults = []
    for check, lines in ((parse, commands(page)), (check_mention, mentions(page))):
        for line in lines:
            try:
                check(line)
            except SystemExit as end:
                if end.code:
                    faults.append(f"iwopd {line}\n    {capsys.readouterr().err.strip().splitlines()[-1]}")
            except (AssertionError, ValueError) as error:
                faults.append(f"iwopd {line}\n    {str(error).splitlines()[0]}")
    assert not faults, f"{page}:\n" + "\n".join(faults)


def test_commands_are_found_where_they_are() -> None:
    assert "make" not in " ".join(commands(Path("README.md")))
    assert len(commands(Path("README.md"))) > 15
    assert len([line for page in pages() for line in commands(page)]) > 60
    with pytest.raises(SystemExit):
        parse("train my.toml --engine veryl")
    with pytest.raises(AssertionError, match=r"optim\.lrr"):
        parse("train my.toml --optim.lrr 1")
    with pytest.raises(AssertionError, match="no --taks"):
        check_mention("eval --taks")


def test_the_reference_has_every_command_option_and_setting() -> None:
    made = reference_pages()
    for name, parser in subcommands().items():
        section = made["commands.md"].partition(f"\n## iwopd {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for action in parser._actions:
            for option in action.option_strings:
                assert option in section, f"iwopd {name} {option}"
    for name, _ in settings():
        assert f"| `{name}` |" in made["settings.md"], name
    assert {f"{name}.md" for name in API} < set(made)


def test_numbers_of_the_first_screen_stand_on_the_pages_that_they_link_to() -> None:
    first_screen = text_of(Path("README.md")).partition("## Two commands")[0]
    rows = [line for line in first_screen.splitlines() if line.startswith("| **")]
    assert len(rows) == 3
    for row in rows:
        (page,) = re.findall(r"\]\((docs/\w+\.md)", row)
        numbers = re.findall(r"[+-]?\d+\.\d+", row)
        assert numbers
        for number in numbers:
            assert number in text_of(Path(page)), f"{number} is not in {page}"
    assert first_screen.index("![") < first_screen.index("| **")


def test_links_are_rewritten_for_the_site_outside_of_code_only() -> None:
    page = (
        "[a](../src/iwopd/cli.py) [b](method.md#loss) [c](../results) [d](tutorial.ipynb)\n```\n[e](../src/iwopd/cli.py)\n```\n"
    )
    text, linked = with_site_links(page, Path("docs/page.md"), {Path("docs/tutorial.md")})
    changed, code = text.split("\n", 1)
    assert changed == "[a](../src/iwopd/cli.py.md) [b](method.md#loss) [c](../results/README.md) [d](tutorial.md)"
    assert code == page.split("\n", 1)[1]
    assert linked == [Path("src/iwopd/cli.py"), Path("docs/method.md"), Path("results")]


def test_the_notebook_keeps_small_outputs_and_no_error() -> None:
    file = ROOT / "docs" / "tutorial.ipynb"
    assert file.stat().st_size < 60_000
    cells = json.loads(file.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in code) >= 5
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    assert all(output.get("name") != "stderr" for cell in code for output in cell["outputs"])
    for place in ("/root/", "/tmp/", "site-packages"):
        assert place not in file.read_text(), "something of the machine on which it was run"


def test_the_example_opens_with_its_finding(tmp_path: Path) -> None:
    """It has the hand-off curve: without it a reader of five seconds sees who won, and not what position bias is."""
    with unpacked() as demo:
        text = write_report([demo], tmp_path / "report.html").read_text(encoding="utf-8")
    (headline,) = re.findall(r"<h1>(.*?)</h1>", text)
    assert re.fullmatch(r"The teacher’s accuracy falls from \d+\s% to \d+\s% along the student’s answer", headline)
    assert '<p class="tile-label">Teacher</p>' in text


def test_the_tour_has_the_numbers_of_the_recorded_demo() -> None:
    tour = text_of(Path("docs/tour.md"))
    with unpacked() as demo:
        curve = json.loads((demo / "handoff.json").read_text())
        for title, name in (("OPD", "opd"), ("IW-OPD", "iw-opd"), ("Prefix-30", "prefix-30"), ("Suffix-30", "suffix-30")):
            records = map(json.loads, (demo / f"{name}-seed0" / "evals.jsonl").read_text().splitlines())
            means = {record["step"]: f"{100 * record['mean']:.1f}" for record in records}
            assert f"| {title} | {' | '.join(means[step] for step in (10, 20, 40))} |" in tour
            assert f"before training the student has {means[0]} " in tour
    shares = [f"{float(share):.0%}".replace("%", " %") for share in curve["fractions"]]
    rights = [f"{one['mean']:.1f}" for one in curve["fractions"].values()]
    assert f"| the student wrote | {' | '.join(shares)} | all |" in tour
    assert f"| % right | {' | '.join(rights)} | {curve['student']['mean']:.1f} |" in tour
    assert f"{curve['problems']} problems" in tour

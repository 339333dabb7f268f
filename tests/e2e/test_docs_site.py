"""The site is built as `make docs` builds it, and the tutorial is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import build_docs
from run_notebook import NOTEBOOK, run_notebook


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    build_docs.gather(out / "source")
    build_docs.build(out)
    return out / "site"


@pytest.mark.slow
def test_the_site_has_search_references_and_the_example(site: Path) -> None:
    assert "demo-handoff.svg" in (site / "index.html").read_text()
    assert "opd_advantages" in (site / "docs/reference/algo.html").read_text()
    assert "--gpus-per-node" in (site / "docs/reference/commands.html").read_text()
    assert "Token by token" in (site / "docs/example/report.html").read_text()
    words = json.dumps(json.loads((site / "search.json").read_text()))
    assert "hand-off curve" in words
    assert "docs/reference/settings.html" in words


@pytest.mark.slow
def test_nothing_of_the_site_comes_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](#nothing)", "anchor"),
        ("::: iwopd.algo.nothing", "nothing"),
    ],
)
def test_a_page_that_is_not_whole_ends_the_build(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "zensical.toml"
    config.write_text(re.sub(r"nav = \[\n.*?\n\]\n", "", build_docs.CONFIG.read_text(), flags=re.DOTALL))
    monkeypatch.setattr(build_docs, "CONFIG", config)
    (tmp_path / "out" / "source").mkdir(parents=True)
    (tmp_path / "out" / "source" / "index.md").write_text(f"# Page\n\n{text}\n")
    with pytest.raises(SystemExit, match="is not whole") as end:
        build_docs.build(tmp_path / "out")
    assert words in str(end.value)


@pytest.mark.slow
def test_the_tutorial_runs() -> None:
    cells = run_notebook(NOTEBOOK).cells
    text = json.dumps([cell.outputs for cell in cells if cell.cell_type == "code"])
    assert "20 steps" in text
    assert "Reverse KL" in text
    assert "<span title=" in text

"""Figures for print: sizes, fonts, and labels that matplotlib could misread."""

from __future__ import annotations

import argparse
import re
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from browser.report_runs import handoff, make_run
from iwopd.cli import add_command
from iwopd.report import ReportError
from iwopd.report.charts import Axis, Chart, Series
from iwopd.report.paper import COLUMN, PAGE, draw, write_figures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    make_run(folder / "opd", "opd")
    make_run(folder / "iw-opd", "iw-opd")
    handoff(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations and a hand-off curve alone: two charts, which are drawn quickly."""
    folder = tmp_path_factory.mktemp("small")
    (make_run(folder / "opd", "opd") / "metrics.jsonl").unlink()
    handoff(folder)
    return folder


def test_every_chart_and_sheet_in_its_width(folder: Path, tmp_path: Path) -> None:
    written, notes = write_figures([folder], tmp_path, file_format="png")
    names = {path.stem for path in written}
    assert {"accuracy-0", "gap", "position-weights-last", "handoff", "health-loss", "health-stages"} <= names
    assert {"panel-learning", "panel-position", "panel-health"} <= names
    assert notes.items == []
    for path in written:
        width, _ = struct.unpack(">II", path.read_bytes()[16:24])
        assert width == pytest.approx(300 * (PAGE if path.stem.startswith("panel-") else COLUMN), abs=1)


def test_pdf_embeds_its_fonts(small: Path, tmp_path: Path) -> None:
    written, _ = write_figures([small], tmp_path, file_format="pdf")
    content = written[0].read_bytes()
    assert content.startswith(b"%PDF")
    assert b"/FontFile2" in content  # TrueType
    assert b"/Type3" not in content


def test_same_runs_same_file(small: Path, tmp_path: Path) -> None:
    first, _ = write_figures([small], tmp_path / "a", file_format="svg")
    second, _ = write_figures([small], tmp_path / "b", file_format="svg")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"<script" not in first[0].read_bytes()


def test_odd_names_are_only_names(tmp_path: Path) -> None:
    for place, name in enumerate(("$x^{", "_hidden", "\x1b[31m", "漢字 \udcff", "<b>&")):
        run = make_run(tmp_path / "runs" / name, seed=place)
        (run / "config.toml").write_text(f"seed = {place}\nsteps = 20\n")
        (run / "metrics.jsonl").unlink()
    written, _ = write_figures([tmp_path / "runs"], tmp_path / "out", file_format="svg")
    assert [path.name for path in written] == ["accuracy-0.svg"]


def test_styles_differ_in_more_than_colour() -> None:
    series = tuple(Series(f"m{style}", style, [0, 1], [style, None]) for style in range(6))
    axes = Figure().add_subplot()
    draw(axes, Chart("c", "t", Axis("x"), Axis("y", zero=True), series, "", markers=True))
    looks = {str(line.get_linestyle()) + str(vars(line)["_dash_pattern"]) for line in axes.lines}
    assert len(looks) == 6
    assert len({line.get_marker() for line in axes.lines}) == 6
    assert axes.get_ylim()[0] == 0


def test_log_probs_have_real_subscripts() -> None:
    axes = Figure().add_subplot()
    y = Axis("$5 for lp₀ − lp_T", range=(0.0, 1.5), tick=0.5)
    draw(
        axes,
        Chart("c", "$x lp", Axis("$ lp_"), y, (Series("m", 0, [0, 1], [0.2, 1.4]),), "", lines=(("low", 0.1), ("high", 1.4))),
    )
    assert axes.get_ylabel() == r"\$5 for lp$_\mathrm{0}$ − lp$_\mathrm{T}$"
    assert axes.get_xlabel() == "$ lp_"  # as it was
    assert [tick for tick in axes.get_yticks() if 0 <= tick <= 1.5] == [0.0, 0.5, 1.0, 1.5]
    assert {text.get_text(): text.get_verticalalignment() for text in axes.texts} == {
        "low": "bottom",
        "high": "top",
    }  # away from the axes


def test_damaged_runs_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "evals.jsonl").unlink()
    written, notes = write_figures([run], tmp_path / "out", file_format="svg")
    assert "gap" in {path.stem for path in written}
    assert any("evals.jsonl is missing" in note.text for note in notes.items)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="nothing to draw"):
        write_figures([run], tmp_path / "out")


def test_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "figures")
    options = parser.parse_args(["figures", str(small), "--format", "svg", "-o", str(tmp_path / "out")])
    assert options.run(options, []) == 0
    assert re.fullmatch(r"\d+ figures in .*out\n", capsys.readouterr().out)
    with pytest.raises(ReportError, match="cannot write figures"):
        write_figures([small], small / "handoff.json")
    with pytest.raises(ReportError, match="unknown format 'gif'"):
        write_figures([small], tmp_path, file_format="gif")

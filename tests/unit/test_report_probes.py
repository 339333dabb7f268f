"""Probes in the report and in figures: recognised, drawn, and survived when they are broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from matplotlib.figure import Figure

from browser.report_runs import handoff, make_probe, make_run
from iwopd.report import ReportError, write_report
from iwopd.report.charts import NEUTRAL, Axis, Chart, Series
from iwopd.report.gathering import ReportData
from iwopd.report.page import read_data
from iwopd.report.panels import build_panels
from iwopd.report.paper import draw, write_figures
from iwopd.report.reading import split_paths
from iwopd.report.sheets import Cell, sheets
from iwopd.report.watch import all_finished, stamps

SECTIONS = ("probe", "handoff", "disagreement", "likelihood", "rules", "horizons", "alignment")


def charts_of(data: ReportData) -> dict[str, Chart]:
    charts = [chart for panel in build_panels(data) for chart in panel.charts]
    assert len({chart.id for chart in charts}) == len(charts)
    return {chart.id: chart for chart in charts}


def changed(path: Path, *where: Any, to: Any) -> Path:
    """A probe with one value replaced, deep inside."""
    values = json.loads(path.read_text())
    inner = values
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = to
    path.write_text(json.dumps(values))
    return path


def test_probes_are_recognised_by_what_is_in_them(tmp_path: Path) -> None:
    runs, probes = tmp_path / "runs", tmp_path / "probes"
    make_run(runs / "opd")
    one = make_probe(probes / "one" / "probe.json")
    two = make_probe(probes / "two" / "probe.json")
    loose = make_probe(tmp_path / "any name.json")
    both = make_run(tmp_path / "both")
    make_probe(both / "probe.json")
    assert split_paths([runs]) == ([runs], [])
    assert split_paths([probes]) == ([], [one, two])
    assert split_paths([one.parent, loose, runs / "opd"]) == ([runs / "opd"], [one, loose])
    assert split_paths([both]) == ([both], [both / "probe.json"])
    assert split_paths([tmp_path / "nowhere"]) == ([tmp_path / "nowhere"], [])


def test_a_probe_alone_makes_a_page(tmp_path: Path) -> None:
    make_probe(tmp_path / "a" / "probe.json", missing={"alignment": "no solutions <here>"}, alignment=None)
    text = write_report([tmp_path / "a"], tmp_path / "report.html").read_text(encoding="utf-8")
    for anchor in (*SECTIONS[:-1], "probes"):
        assert f'<section id="{anchor}"' in text
        assert f'href="#{anchor}"' in text
    for absent in ("runs", "missing", "summary", "learning", "tokens", "health", "alignment"):
        assert f'<section id="{absent}"' not in text
    assert "<title>small from large · iwopd report</title>" in text
    for words in (
        "Strong position bias",
        "It falls.",
        "agreement after drifts",
        "\u22120.25",
        "a remark of the probe",
        "gradient alignment</strong>: no solutions &lt;here",
    ):
        assert words in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_charts_hold_the_numbers_of_the_probe(tmp_path: Path) -> None:
    path = make_probe(tmp_path / "probe.json")
    probe = json.loads(path.read_text())
    charts = charts_of(read_data([path]))
    curve = charts["handoff"].series[0]
    assert list(curve.x) == pytest.approx([0, 30, 90])
    assert curve.y == pytest.approx([90, 60, 40])
    assert curve.low == pytest.approx([85, 55, 35])
    assert [(label, round(height, 6)) for label, height in charts["handoff"].lines] == [("student alone", 35.0)]
    gap = charts["probe-gap"].series[0]
    assert list(gap.x) == pytest.approx([5.0 + 10 * place for place in range(10)])
    assert gap.y == pytest.approx(probe["positions"]["abs_gap"]["mean"])
    assert charts["probe-share"].lines == (("even spread", 10.0),)
    sums = {series.label: series for series in charts["probe-sums"].series}
    signed = sums["signed: minus the sum of gaps"]
    assert signed.y == pytest.approx([5.0 * (place + 1) for place in range(10)])
    assert signed.low is not None
    assert signed.low[0] == pytest.approx(5 - 0.05)  # the band is turned over, too
    assert [series.label for series in charts["probe-weights-ideal"].series] == [
        f"Ideal weight, alpha {alpha}" for alpha in ("1", "0.1", "0.01", "0.001")
    ]
    assert [series.label for series in charts["probe-weights-other"].series] == ["Of a plug-in"]
    gain = charts["probe-gain"]
    assert gain.bars[0] == "OPD"
    assert list(gain.series[0].y)[:2] == [None, pytest.approx(0.1)]
    assert [gain.filled(gain.series[0], row) for row in (0, 1)] == [False, True]
    assert charts["probe-cosine"].lines == (("OPD", 0.3),)
    assert charts["probe-regions-share"].series[0].y == pytest.approx([10, 20, 30, 70])
    regions = charts["probe-regions"]
    assert len(regions.bars) == 4
    verdicts = charts["probe-verdicts"]
    assert verdicts.bars[:2] == ("OPD, right", "OPD, wrong")
    assert list(verdicts.series[0].y) == pytest.approx([0.1, 0.4, 0.1, 0.4])
    assert "12 of each" in verdicts.caption


def test_horizons_by_tokens_and_what_is_kept(tmp_path: Path) -> None:
    path = make_probe(tmp_path / "probe.json")
    chart = charts_of(read_data([path]))["probe-horizons"]
    drawn = {one.label: one for one in chart.series}
    assert list(drawn) == ["OPD, drift", "OPD, fixed", "Survival, drift", "Survival, fixed"]
    assert list(drawn["OPD, drift"].x) == pytest.approx([30, 40, 100])
    assert list(drawn["OPD, fixed"].y) == pytest.approx([0.25, 0.5, 1.0])
    assert drawn["OPD, fixed"].low == pytest.approx([0.21, 0.46, 1.0])
    assert chart.lines == (("0.9, asked of a proposal", 0.9),)
    text = write_report([path], tmp_path / "report.html").read_text(encoding="utf-8")
    for words in ("Horizon for Survival: drift 0.1.", "threshold = 0.1", "× 2.50", "25.0 (23.0 to 27.0)"):
        assert words in text
    other = make_probe(tmp_path / "other" / "probe.json", "medium")
    both = charts_of(read_data([path, other]))["probe-horizons"]
    labels = [(one.label, one.style, one.dash) for one in both.series]
    assert labels[:2] == [("small: OPD", 0, 0), ("small: Survival", 0, 1)]
    assert [style for _, style, _ in labels] == [0, 0, 1, 1]


def test_probes_without_horizons_are_shown(tmp_path: Path) -> None:
    """Those of older versions."""
    path = make_probe(tmp_path / "probe.json")
    values = json.loads(path.read_text())
    del values["horizons"]
    path.write_text(json.dumps(values))
    charts = charts_of(read_data([path]))
    assert "probe-horizons" not in charts
    assert "probe-gain" in charts


def test_probes_of_older_versions_are_shown_without_verdicts(tmp_path: Path) -> None:
    path = make_probe(tmp_path / "probe.json")
    values = json.loads(path.read_text())
    del values["alignment"]["verdicts"], values["alignment"]["compared"]
    path.write_text(json.dumps(values))
    charts = charts_of(read_data([path]))
    assert "probe-verdicts" not in charts
    assert "probe-gain" in charts


def test_advantages_have_no_curve_of_weights(tmp_path: Path) -> None:
    """Theirs are 1 everywhere; their share of the update is shown."""
    path = make_probe(tmp_path / "probe.json")
    values = json.loads(path.read_text())
    plain = values["rules"]["rules"][0]
    values["rules"]["rules"].append({**plain, "key": "power", "title": "PowerOPD's advantage", "advantage": "power"})
    path.write_text(json.dumps(values))
    charts = charts_of(read_data([path]))
    assert "PowerOPD's advantage" not in [series.label for series in charts["probe-weights-sums"].series]
    assert "PowerOPD's advantage" in charts["probe-first"].bars


def test_several_probes_are_compared_by_colour(tmp_path: Path) -> None:
    paths = [make_probe(tmp_path / name / "probe.json", name) for name in ("small", "medium")]
    make_run(tmp_path / "run")
    data = read_data([tmp_path / "run"], probes=paths, handoff=handoff(tmp_path))
    charts = charts_of(data)
    assert [(one.label, one.style) for one in charts["probe-kl"].series] == [("small", 0), ("medium", 1)]
    assert charts["probe-kl"].by == "probe"
    curves = [(one.label, one.style) for one in charts["handoff"].series if one.legend]
    assert curves == [("small", 0), ("medium", 1), ("hand-off file, world drift", NEUTRAL)]  # both, labelled
    assert [one.y[0] for one in charts["handoff"].series if not one.legend] == pytest.approx([35, 35, 30])
    assert {"probe-weights-ideal-0", "probe-weights-ideal-1", "probe-sums-0", "probe-sums-1"} <= set(charts)
    text = write_report([tmp_path / "run"], tmp_path / "r.html", probes=paths).read_text(encoding="utf-8")
    for key in ("probe-0", "probe-1", "method-0"):
        assert f'data-key="{key}"' in text


def test_many_probes_have_a_section_each(tmp_path: Path) -> None:
    for place in range(5):
        make_probe(tmp_path / f"{place}" / "probe.json")  # the same models: told apart by folder
    panels = build_panels(read_data([tmp_path]))
    assert [panel.id for panel in panels] == [f"probe-{place}" for place in range(1, 6)]
    assert panels[1].title == "Probe: small (1)"
    assert len(panels[0].charts) == len(panels[4].charts) == 20
    assert len(charts_of(read_data([tmp_path]))) == 5 * 20
    text = write_report([tmp_path], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<title>5 probes · iwopd report</title>" in text


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("format",), 7, "has format 7"),
        (("rollouts",), None, "rollouts"),
        (("positions", "abs_gap", "mean"), [1.0], "'positions' is left out: abs_gap does not have one point for each of 10"),
        (("positions", "edges"), [], "'positions' is left out: its axis does not rise"),
        (("overlap", "edges", 3), float("nan"), "'overlap' is left out"),
        (("handoff", "fractions"), [0.5, 0.1, 0.2], "'handoff' is left out: its axis does not rise"),
        (("likelihood", "by_token", "teacher", "high", 0), 1e300, "'likelihood' is left out: high holds a number"),
        (("rules", "rules", 2, "weights", "low"), [], "'rules' is left out: weights does not"),
        (("alignment", "rules", 1, "cosine", "mean"), -1e200, "'alignment' is left out"),
    ],
)
def test_bad_probes_become_notes_and_the_rest_is_shown(tmp_path: Path, where: tuple[Any, ...], value: Any, words: str) -> None:
    good = make_probe(tmp_path / "good.json", "fine")
    bad = changed(make_probe(tmp_path / "bad.json"), *where, to=value)
    data = read_data([good, bad])
    assert any(words in note.text and note.where == "bad" for note in data.notes.items), data.notes.items
    charts = charts_of(data)
    assert "probe-gap" in charts
    text = write_report([good, bad], tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'id="missing"' in text
    assert "fine" in text
    if len(where) > 1:  # only the part is left out
        part = {"positions": "probe-gap", "overlap": "probe-overlap", "likelihood": "probe-likelihood"}.get(where[0])
        assert len(data.probes) == 2
        assert part is None or len({one.style for one in charts[part].series}) == 1


def test_hostile_words_are_only_words(tmp_path: Path) -> None:
    evil = "</script><b>\ud800\u202e$x^{"
    words: dict[str, Any] = {"notes": [evil], "verdict": [evil], "missing": {evil: evil}}
    paths = [make_probe(tmp_path / f"{name}.json", evil + name, **words) for name in "ab"]
    for path in paths:
        changed(path, "alignment", "rules", 1, "title", to=evil)
        changed(path, "rules", "rules", 1, "title", to=evil)
    text = write_report(paths, tmp_path / "r.html").read_bytes().decode("utf-8")
    assert "<b>" not in text.partition("<script>")[0]
    assert "\u202e" not in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
    for layout in ("charts", "paper"):
        assert write_figures(paths[:1], tmp_path / layout, file_format="svg", layout=layout)[0]  # type: ignore[arg-type]


def test_nulls_are_survived(tmp_path: Path) -> None:
    def nothing(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: nothing(inner, key) for key, inner in value.items()}
        if isinstance(value, list) and name in ("mean", "low", "high"):
            return [None] * len(value)
        if isinstance(value, list):
            return [nothing(inner, name) for inner in value]
        return None if name in ("mean", "low", "high") else value

    path = make_probe(tmp_path / "probe.json")
    path.write_text(json.dumps(nothing(json.loads(path.read_text()))))
    assert "not measured" in write_report([path], tmp_path / "r.html").read_text(encoding="utf-8")
    for layout in ("charts", "paper"):
        assert write_figures([path], tmp_path / layout, file_format="svg", layout=layout)[0]


def test_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ReportError, match="nothing to report on") as caught:
        write_report([tmp_path / "list.json", tmp_path / "deep.json"], tmp_path / "r.html")
    assert "list: this probe is left out" in str(caught.value)
    make_run(tmp_path / "run")
    data = read_data([tmp_path / "run"], probes=[tmp_path / "list.json"])
    assert len(data.runs) == 1
    make_probe(tmp_path / "good.json")
    data = read_data([tmp_path / "gone", tmp_path / "good.json"])
    assert len(data.probes) == 1
    assert any(note.where == "gone" for note in data.notes.items)


def test_watching_sees_probes(tmp_path: Path) -> None:
    path = make_probe(tmp_path / "a" / "probe.json")
    before = stamps([path])
    assert before == stamps([path.parent])
    make_probe(path, "another")
    assert stamps([path]) != before
    assert all_finished([path])
    assert not all_finished([tmp_path / "later"], [path])  # the run has not begun


# --- print ------------------------------------------------------------------------------------------------------------


def test_dots_in_print() -> None:
    series = tuple(Series(f"s{turn}", turn, [0, 1], [0.5, None], [0.2 - turn, None], [0.8, None]) for turn in (0, 1))
    chart = Chart("c", "t", Axis("cosine"), Axis(""), series, "", kind="dots", bars=("first", "second"), lines=(("OPD", 0.4),))
    axes = Figure().add_subplot()
    draw(axes, chart)
    drawn: list[Any] = list(axes.lines)
    dots = [line for line in drawn if len(line.get_xdata()) == 1]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [0.5, 0.5]
    assert float(dots[0].get_ydata()[0]) < 0 < float(dots[1].get_ydata()[0])  # side by side
    assert dots[0].get_markerfacecolor() != "white"  # 0.2 to 0.8
    assert dots[1].get_markerfacecolor() == "white"  # -0.8 to 0.8
    spans = [ends for line in drawn if (ends := list(line.get_xdata())) in ([0.2, 0.8], [-0.8, 0.8])]
    assert spans == [[0.2, 0.8], [-0.8, 0.8]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is on top


def filled(cells: list[Cell]) -> str:
    return "".join("-" if cell.chart is None else letter for letter, cell in zip("abc", cells, strict=False))


def method_run(folder: Path, method: str, weights: str, student: str | None = None, **params: Any) -> Path:
    """A run of any rule."""
    run = make_run(folder, method if method in ("opd", "iw-opd") else "opd", rollouts=0)
    models = {"student": student, "teacher": "T"} if student else {"world": "drift"}
    config = {"seed": 0, "steps": 20, "method": {"weights": weights, "params": params}, "models": models}
    (run / "config.toml").write_text(tomli_w.dumps(config))
    return run


def test_paper_layout_says_what_a_place_needs(tmp_path: Path) -> None:
    probe = make_probe(tmp_path / "probe.json")
    assert [filled(cells) for cells in sheets(read_data([probe])).values()] == ["-b", "--", "-bc", "-bc"]
    written, notes = write_figures([probe], tmp_path / "out", file_format="svg", layout="paper")
    assert [path.name for path in written] == ["fig1.svg", "fig3.svg", "fig4.svg"]
    assert any(note.where == "fig2" and "several students" in note.text for note in notes.items)
    with pytest.raises(ReportError, match="unknown layout 'poster'"):
        write_figures([probe], tmp_path, layout="poster")


def test_paper_layout_from_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for student in ("S-4B", "S-600M", "S-1.7B"):
        method_run(runs / f"opd-{student}", "opd", "uniform", student)
        method_run(runs / f"iw-{student}", "iw-opd", "cumulative-share", student, gamma=0.5)
    for name in ("prefix-only", "suffix-only"):
        method_run(runs / name, name, name, "S-4B", ratio=0.3)
    for alpha in (1.0, 0.01):
        method_run(runs / f"ideal-{alpha}", "ideal", "ideal", "S-4B", alpha=alpha)
    found = sheets(read_data([runs], handoff=handoff(tmp_path)))
    assert [filled(sheet) for sheet in found.values()] == ["ab", "ab", "ab-", "a--"]
    by_size = found["fig2"][1].chart
    assert by_size is not None
    assert by_size.bars == ("S-600M", "S-1.7B", "S-4B")  # by size, not by name
    evals = {
        name: [json.loads(line)["mean"] for line in (runs / name / "evals.jsonl").read_text().splitlines()]
        for name in ("opd-S-600M", "iw-S-600M")
    }
    assert by_size.series[0].y[0] == pytest.approx(100 * (evals["iw-S-600M"][-1] - evals["opd-S-600M"][-1]))
    ideal = found["fig4"][0].chart
    assert ideal is not None
    assert {one.label for one in ideal.series} == {"alpha 1", "alpha 0.01"}
    assert len(found["fig2"][0].chart.series) == 2  # type: ignore[union-attr]
    written, _ = write_figures([runs], tmp_path / "out", file_format="svg", layout="paper")
    assert [path.stem for path in written] == ["fig1", "fig2", "fig3", "fig4"]

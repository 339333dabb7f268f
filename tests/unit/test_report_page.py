"""The page as a file: escaping, policy, sizes, and what it refuses. What it does in a browser is in `tests/browser`."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser.report_runs import handoff, lines, make_run, read_lines
from iwopd.commands import report as command
from iwopd.report import ReportError, write_report
from iwopd.report.charts import LIGHT, dash_of, full_axis
from iwopd.report.page import as_script_json, check_out, policy_hash, read_data, symbols
from iwopd.report.panels import build_panels
from iwopd.report.text import printable

PLOTLY = "4.1.1", "99784e3abfb07b14"  # version and beginning of the SHA-256 of the bundle


class Reader(HTMLParser):
    """Scripts, styles, policy and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.styles: list[str] = []
        self.policy = ""
        self.attributes: list[tuple[str, str]] = []
        self._inside: str | None = None
        self._text, self._found = "", {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.attributes += list(found.items())
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag in ("script", "style"):
            self._inside, self._text, self._found = tag, "", found

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.scripts.append((self._found, self._text))
        elif tag == "style":
            self.styles.append(self._text)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for name in ("opd", "iw-opd"):
        make_run(folder / name, name)
    handoff(folder)
    return write_report([folder], folder / "report.html")


def test_policy_names_every_script_and_style_and_nothing_else(page: Path) -> None:
    found = Reader(page.read_text(encoding="utf-8"))
    code = [text for attributes, text in found.scripts if attributes.get("type") != "application/json"]
    assert len(code) == 4
    for source in code:
        assert policy_hash(source) in found.policy
    for style in found.styles:
        assert policy_hash(style) in found.policy
    assert found.policy.count("sha256-") == len(code) + len(found.styles)
    assert found.policy.startswith("default-src 'none'; ")
    for words in ("connect-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data: blob:"):
        assert words in found.policy
    assert "unsafe" not in found.policy
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "src", "srcset")]
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")


def test_page_is_small_and_has_all_panels(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 6_000_000
    for anchor in ("summary", "learning", "position", "tokens", "health", "runs"):
        assert f'<section id="{anchor}"' in text
        assert f'href="#{anchor}"' in text
    assert text.index('id="summary"') < text.index('id="figure-handoff"') < text.index('id="learning"')
    assert 'id="missing"' not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_data_blocks_are_json(page: Path) -> None:
    found = Reader(page.read_text(encoding="utf-8"))
    blocks = {a["id"]: json.loads(text) for a, text in found.scripts if a.get("type") == "application/json"}
    assert set(blocks) == {"data-page", "data-charts", "data-tokens"}
    assert [run["name"] for run in blocks["data-tokens"]["runs"]] == ["iw-opd", "opd"]


@given(st.text() | st.sampled_from(["</script><script>", "<!--", "\ud800", "&lt;", "]]>", "\u2028"]))
def test_strings_in_scripts_cannot_end_them(text: str) -> None:
    written = as_script_json({text: [text]})
    assert not set(written) & set("<>&")
    assert json.loads(written) == {text: [text]}
    written.encode("ascii")


@given(st.text())
def test_printable_text_can_be_printed(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert printable("täxt, 1 < 2\n") == "täxt, 1 < 2\n"
    assert printable("\x1b[31m\u202e\ud800") == "␛[31m\ufffd\ufffd"


def test_charts_hold_the_numbers_of_the_runs(page: Path) -> None:
    data = read_data([page.parent])
    charts = {chart.id: chart for panel in build_panels(data) for chart in panel.charts}
    records = read_lines(page.parent / "opd" / "metrics.jsonl")
    gap = next(series for series in charts["gap"].series if series.label == "OPD")
    assert gap.y == pytest.approx([record["gap/abs_mean"] for record in records])
    start = next(series for series in charts["position-abs-gap-first"].series if series.label == "OPD")
    means = [sum(r["position/abs_gap"][place] for r in records[:2]) / 2 for place in range(10)]  # a tenth of 20 steps
    assert start.y == pytest.approx(means)
    assert list(start.x) == [5.0 + 10 * place for place in range(10)]
    assert charts["handoff"].series[0].y == [90.0 - 6 * tenth for tenth in range(10)]
    assert charts["handoff"].lines == (("student alone", 30.0),)
    styles = {(series.label, series.style) for name in ("accuracy-0", "gap") for series in charts[name].series}
    assert styles == {("OPD", 0), ("IW-OPD", 1)}  # the same method looks the same everywhere


def test_curves_that_look_the_same_are_drawn_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    charts = {chart.id: chart for panel in build_panels(read_data([run])) for chart in panel.charts}
    assert not {"kl", "position-kl-first", "position-kl-last"} & set(charts)
    assert "the sampled reverse KL) it is" in charts["gap"].caption
    assert "the sampled reverse KL) it is" in charts["position-abs-gap-first"].caption
    mixed = [{**one, "kl/sampled": 0.1, "position/kl": [0.1] * 10} for one in read_lines(run / "metrics.jsonl")]
    lines(run / "metrics.jsonl", mixed)  # gaps of both signs: another curve
    charts = {chart.id: chart for panel in build_panels(read_data([run])) for chart in panel.charts}
    assert {"kl", "position-kl-first", "position-kl-last"} < set(charts)
    assert "reverse KL" not in charts["gap"].caption


def test_ticks_enclose_all_weights(page: Path) -> None:
    charts = {chart.id: chart for panel in build_panels(read_data([page.parent])) for chart in panel.charts}
    axis = charts["position-weights-first"].y
    assert axis.range == (0.0, 1.5)
    assert axis.tick == 0.5
    assert full_axis("", [1.43]).range == (0.0, 1.5)
    assert full_axis("", [-0.2, 3.1]).range == (-1.0, 4.0)
    assert full_axis("", []).range == (0.0, 0.25)
    assert full_axis("", [0.0007]).range == pytest.approx((0.0, 0.0008))


def test_log_probs_have_real_subscripts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    visible = re.sub(r"<script.*?</script>|aria-label=\"[^\"]*\"", "", text, flags=re.DOTALL)
    assert "lp_T" not in visible
    assert "lp<sub>T</sub>" in visible
    assert symbols("<b>lp_T</b> lp₀ \x1b") == "&lt;b&gt;lp<sub>T</sub>&lt;/b&gt; lp<sub>0</sub> ␛"


def test_no_two_styles_look_the_same() -> None:
    looks = [(LIGHT[style % len(LIGHT)], dash_of(style)) for style in range(16)]
    assert len(set(looks)) == 16
    assert dash_of(0) != dash_of(6)  # the two blues
    assert dash_of(-1) == "solid"


def test_alerts_are_on_the_page_with_what_to_do(tmp_path: Path, page: Path) -> None:
    assert 'id="alerts"' not in page.read_text(encoding="utf-8")
    assert "No alert. Watched in every step: length inflation, truncation" in page.read_text(encoding="utf-8")
    for seed in (0, 1):
        run = make_run(tmp_path / f"opd-{seed}", seed=seed)
    records = read_lines(run / "metrics.jsonl")
    cut = [{**one, "rollout/truncated": 0.5, "rollout/length_max": 64} if one["step"] > 10 else one for one in records]
    lines(run / "metrics.jsonl", [{**one, "skipped": one["step"] == 3, "update/skipped": int(one["step"] == 3)} for one in cut])
    text = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    box = re.search(r'<section id="alerts" class="note-box".*?</section>', text, re.DOTALL)
    assert box is not None
    for words in (
        "Skipped updates",
        "at step 3",
        "Truncation",
        "since step 11",
        "50% of the answers",
        "1 of 2 runs, here opd-1",
    ):
        assert words in box[0], words
    assert "Raise rollout.max_tokens" in box[0]
    assert "No alert." not in text


def test_answers_of_the_embedded_world_are_explained(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "modulo 10, so 4*3=2 is right" in text
    assert "4*3=2;7+2-9" in text  # the example as the world solves it
    run = make_run(tmp_path / "run")
    (run / "config.toml").write_text("seed = 0\nsteps = 20\n[models]\nstudent = 's'\nteacher = 't'\n")
    assert "modulo 10" not in write_report([run], tmp_path / "r.html").read_text(encoding="utf-8")


def test_bands_over_seeds(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_run(tmp_path / f"opd-{seed}", seed=seed)
    panels = {panel.id: panel for panel in build_panels(read_data([tmp_path]))}
    assert "health-agreement" in {chart.id for chart in panels["health"].charts}
    loss = next(chart for chart in panels["health"].charts if chart.id == "health-loss")
    values = [read_lines(tmp_path / f"opd-{seed}" / "metrics.jsonl")[4]["loss"] for seed in (0, 1, 2)]
    (series,) = loss.series
    assert series.low is not None
    assert series.high is not None
    assert (series.low[4], series.y[4], series.high[4]) == pytest.approx((min(values), sum(values) / 3, max(values)))
    assert loss.band == "from the lowest to the highest seed"


def test_summary_compares_pairs(tmp_path: Path) -> None:
    make_run(tmp_path / "opd", problems=200)
    make_run(tmp_path / "iw-opd", "iw-opd", problems=200, skill=0.001)
    panels = {panel.id: panel for panel in build_panels(read_data([tmp_path]))}
    (table,) = panels["summary"].context["tables"]
    rows = {row["label"]: row for row in table["rows"]}
    means = {name: read_lines(tmp_path / name / "evals.jsonl")[-1]["mean"] for name in ("opd", "iw-opd")}
    assert rows["IW-OPD"]["difference"].interval.mean == pytest.approx(means["iw-opd"] - means["opd"])
    assert rows["IW-OPD"]["verdict"] == "lower"
    assert rows["OPD"]["verdict"] == "reference"
    assert rows["OPD"]["gain"].interval.low > 0
    assert rows["OPD"]["final"].mean == pytest.approx(100 * means["opd"])


def test_the_summary_says_in_which_sandbox_programs_ran(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_report([run], tmp_path / "without.html")
    assert "Sandbox in which" not in (tmp_path / "without.html").read_text()
    lines(run / "evals.jsonl", [dict(record, sandbox="none: <unprotected>") for record in read_lines(run / "evals.jsonl")])
    write_report([run], tmp_path / "with.html")
    assert "Sandbox in which programs ran: none: &lt;unprotected&gt;." in (tmp_path / "with.html").read_text()


def test_runs_of_different_tasks_are_shown_but_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "opd")
    make_run(tmp_path / "iw-opd", "iw-opd", task="other")
    text = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "not compared with the runs that were" in text
    assert "Accuracy on tiny" in text
    assert "Accuracy on other" in text


def test_pages_hold_a_subset_only_if_they_say_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=6, length=30)
    out = write_report([folder], tmp_path / "report.html", max_tokens=8 * 30)
    found = Reader(out.read_text(encoding="utf-8"))
    block = next(json.loads(text) for a, text in found.scripts if a.get("id") == "data-tokens")
    steps = [row[0] for row in block["runs"][0]["rollouts"]]
    assert steps == [0, 0, *[20] * 6]  # the last evaluation first, then the first one
    assert "holds 8 of 18 kept rollouts" in out.read_text(encoding="utf-8")


def test_existing_files_that_are_no_reports_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    other = tmp_path / "thesis.html"
    other.write_text("<p>years of work</p>")
    with pytest.raises(ReportError, match="is not a report"):
        write_report([folder], other)
    assert other.read_text() == "<p>years of work</p>"
    with pytest.raises(ReportError, match="is a directory"):
        write_report([folder], tmp_path)
    with pytest.raises(ReportError, match="cannot write"):
        write_report([folder], other / "deeper" / "report.html")
    out = write_report([folder], tmp_path / "new" / "report.html")
    check_out(out)  # a report may be replaced
    assert not list(out.parent.glob(".tmp*"))


def test_rollouts_alone_make_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "evals.jsonl", "run.json", "config.toml"):
        (folder / name).unlink()
    text = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    for words in ("metrics.jsonl is missing", "evals.jsonl is missing", "no run has metrics", "Token by token"):
        assert words in text


def test_nulls_everywhere_are_survived(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    records = [
        {name: value if name == "step" else None for name, value in record.items()}
        for record in read_lines(folder / "metrics.jsonl")
    ]
    records[3]["position/abs_gap"] = ["x", None, 1e400]
    lines(folder / "metrics.jsonl", records)
    lines(folder / "rollouts.jsonl", [{"step": 0, "tokens": []}, {"step": 0, "tokens": ["a"], "gap": [None], "correct": "yes"}])
    assert write_report([folder], tmp_path / "report.html").exists()


def test_the_library_is_the_one_we_looked_at() -> None:
    content = resources.files("iwopd.report").joinpath("assets", "vendor", "plotly-basic.min.js").read_bytes()
    assert f"plotly.js (basic - minified) v{PLOTLY[0]}".encode() in content[:200]
    assert hashlib.sha256(content).hexdigest().startswith(PLOTLY[1])
    assert b"</script" not in content.lower()
    assert b"<!--" not in content


def test_command_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    program = (
        "import argparse, sys\nfrom iwopd.cli import add_command\nparser = argparse.ArgumentParser()\n"
        "add_command(parser.add_subparsers(), 'report')\n"
        "options = parser.parse_args(sys.argv[1:])\nsys.exit(options.run(options, []))"
    )
    words = [sys.executable, "-c", program, "report", str(folder), "-o", str(tmp_path / "out.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"report: {tmp_path / 'out.html'}\n"
    assert done.stderr == ""


def test_the_page_can_be_opened_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import argparse
    import webbrowser

    folder, out = make_run(tmp_path / "run"), tmp_path / "my page.html"
    parser = argparse.ArgumentParser()
    command.add(parser)
    opened: list[str] = []

    def browser(address: str) -> bool:
        opened.append(address)
        return len(opened) == 1

    monkeypatch.setattr(webbrowser, "open", browser)
    words = [str(folder), "-o", str(out)]
    assert command.run(parser.parse_args(words), []) == 0
    assert opened == []
    command.run(parser.parse_args([*words, "--open"]), [])
    assert opened == [out.as_uri()]
    assert "no browser" not in capsys.readouterr().out
    command.run(parser.parse_args([*words, "--open", "--watch", "--every", "0.1"]), [])
    assert opened == [out.as_uri()] * 2
    assert f"no browser could be started here: open {out.as_uri()}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("every", 0.0), ("every", 1e9), ("max_tokens", -1)])
def test_command_refuses_nonsense(tmp_path: Path, name: str, value: float) -> None:
    import argparse

    options = {
        "runs": [tmp_path],
        "probe": [],
        "open": False,
        "out": tmp_path / "r.html",
        "handoff": None,
        "max_tokens": None,
        "watch": True,
        "every": 5.0,
    }
    with pytest.raises(ReportError, match=f"--{name.replace('_', '-')}"):
        command.run(argparse.Namespace(**{**options, name: value}), [])


def test_tokens_can_be_read_on_every_colour_in_both_themes() -> None:
    css = resources.files("iwopd.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    colours = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", css)}
    inks = dict.fromkeys([f"d{i}" for i in range(11)] + [f"q{i}" for i in range(9)], "on-light")
    for classes, ink in re.findall(r"((?:\.[dq]\d+(?:, )?)+) \{ color: var\(--([\w-]+)\)", css):
        inks |= {name.strip(" ."): ink for name in classes.split(",")}
    assert len(set(inks.values())) == 3

    def luminance(colour: str) -> float:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(first: str, second: str) -> float:
        low, high = sorted((luminance(first), luminance(second)))
        return (high + 0.05) / (low + 0.05)

    for theme in (0, 1):
        for place, ink in inks.items():
            assert contrast(colours[place][theme], colours[ink][theme]) > 4, (place, theme)
        for ink in ("text", "soft", "good", "bad", "link"):
            assert contrast(colours["bg"][theme], colours[ink][theme]) > 4.5, (ink, theme)

"""The words at the top of the page: what the teacher is worth along the answer, who learned, and who wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from browser.report_runs import handoff, lines, make_probe, make_run
from iwopd.report import write_report
from iwopd.report.headline import Fall, fall_words, find_fall
from iwopd.report.page import read_data
from iwopd.report.panels import build_panels

PROBLEMS = 200


def scored(folder: Path, method: str, before: int, after: int, *, seed: int = 0) -> Path:
    """A run that gets so many of 200 problems right, before and after: the first ones."""
    make_run(folder, method, seed=seed)
    ids = [f"tiny/{place}" for place in range(PROBLEMS)]
    lines(
        folder / "evals.jsonl",
        [
            {
                "step": step,
                "task": "tiny",
                "problems": PROBLEMS,
                "samples": 1,
                "mean": right / PROBLEMS,
                "problem_ids": ids,
                "scores": [[float(place < right)] for place in range(PROBLEMS)],
            }
            for step, right in ((0, before), (20, after))
        ],
    )
    return folder


def summary(folder: Path, **options: Any) -> dict[str, Any]:
    return next(panel.context for panel in build_panels(read_data([folder], **options)) if panel.id == "summary")


def test_the_finding_is_the_headline(tmp_path: Path) -> None:
    for method, after in (("opd", 140), ("iw-opd", 150)):
        scored(tmp_path / method, method, 60, after)
    handoff(tmp_path)
    found = summary(tmp_path)
    assert found["headline"] == "The teacher’s accuracy falls from 90\u00a0% to 36\u00a0% along the student’s answer"
    assert "Half of its lead is gone after the first 50\u00a0% of an answer" in found["position"]
    assert "the student alone reaches 30\u00a0%" in found["position"]
    text = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"<h1>{found['headline']}</h1>" in text
    assert '<p class="tile-label">Teacher</p>\n    <p class="tile-number">90.0<small> %</small></p>' in text


@pytest.mark.parametrize(
    ("after", "kind", "words"),
    [
        (140, "learned", "OPD (+40.0) learned"),
        (64, "not shown", "OPD (+2.0, +0.5 to +4.0): no gain shown"),
        (70, "little", "OPD (+5.0, +2.5 to +8.5) learned next to nothing"),
        (60, "not shown", "no gain shown"),
        (20, "worse", "got worse"),
    ],
)
def test_only_what_is_worth_the_name_is_called_learning(tmp_path: Path, after: int, kind: str, words: str) -> None:
    """The teacher's lead is 60 points."""
    scored(tmp_path / "opd", "opd", 60, after)
    handoff(tmp_path)
    (table,) = summary(tmp_path)["tables"]
    assert table["rows"][0]["learned"] == kind
    assert words.split(" (")[0] in table["findings"]["Learned"]
    assert words.rpartition(")")[2] in table["findings"]["Learned"]


def test_without_a_teacher_the_best_gain_is_the_measure(tmp_path: Path) -> None:
    scored(tmp_path / "opd", "opd", 60, 180)
    scored(tmp_path / "iw-opd", "iw-opd", 60, 70)
    found = summary(tmp_path)
    assert [row["learned"] for row in found["tables"][0]["rows"]] == ["learned", "little"]
    assert found["headline"] == "OPD is ahead"


@pytest.mark.parametrize(
    ("iw", "expected", "sure"),
    [
        (180, "IW-OPD beats OPD", "hardly by chance"),
        (141, "No winner between OPD and IW-OPD", "may be chance"),
        (100, "OPD is ahead", "hardly by chance"),
    ],
)
def test_who_wins_and_how_sure_that_is(tmp_path: Path, iw: int, expected: str, sure: str) -> None:
    scored(tmp_path / "opd", "opd", 60, 140)
    scored(tmp_path / "iw-opd", "iw-opd", 60, iw)
    found = summary(tmp_path)
    assert found["headline"] == expected
    assert found["tables"][0]["findings"]["Winner"].startswith(f"{expected}: ")
    assert sure in found["tables"][0]["findings"]["Winner"]


def test_one_run_says_how_far_it_came(tmp_path: Path) -> None:
    assert summary(scored(tmp_path / "opd", "opd", 60, 140))["headline"] == "OPD takes the student from 30.0 to 70.0\u00a0%"


def test_a_probes_curve_serves_as_well(tmp_path: Path) -> None:
    run, probe = make_run(tmp_path / "run"), make_probe(tmp_path / "probe.json")
    fall = find_fall(read_data([run], probes=[probe]))
    assert fall is not None
    assert (fall.start, fall.end) == pytest.approx((90.0, 40.0))
    assert fall.half == pytest.approx(0.275)  # half way from 90 to the student's 35
    assert fall.teacher == fall.curve[0]
    several = [probe, make_probe(tmp_path / "other.json", "other")]
    assert find_fall(read_data([run], probes=several)) is None


def test_a_curve_that_does_not_fall_is_no_fall() -> None:
    flat = Fall((0.0, 0.9), ((90.0, 85.0, 95.0), (88.0, 82.0, 93.0)), (40.0, 35.0, 45.0), None)
    assert not flat.is_shown
    assert flat.half is None
    assert "as often as before, as far as these problems can tell" in fall_words(flat)
    assert Fall((0.0, 0.9), ((30.0, None, None), (20.0, None, None)), (40.0, None, None), None).half is None


def test_nothing_evaluated_leaves_the_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "evals.jsonl").unlink()
    text = write_report([run], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<h1>run</h1>" in text


def test_a_dip_below_the_student_is_explained(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    file = handoff(tmp_path)
    captions = []
    for height in (20.0, 40.0, 60.0):  # the curve ends at 36, its interval at 41
        curve = json.loads(file.read_text())
        curve["student"] = {"mean": height}
        file.write_text(json.dumps(curve))
        panels = build_panels(read_data([run], handoff=file))
        captions.append(next(chart.caption for panel in panels for chart in panel.charts if chart.id == "handoff"))
    assert "Below the dotted line" not in captions[0]
    assert "though not by more than chance" in captions[1]
    assert "strange to the teacher" in captions[2]

"""`probe.json` and the verdict in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from iwopd.algo.drift_weights import gate
from iwopd.analysis.probe.present import bar, print_probe
from iwopd.analysis.probe.result import (
    Agreement,
    Aligned,
    Alignment,
    ByVerdict,
    Curve,
    Drift,
    Estimate,
    Handoff,
    Positions,
    Probe,
    ProbeError,
    Rollouts,
    read_probe,
    write_probe,
)
from iwopd.analysis.probe.settings import ProbeSettings
from iwopd.analysis.probe.verdict import PLAIN, judge


def estimate(mean: float, half: float = 0.0) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def curve(*means: float) -> Curve:
    return Curve(mean=list(means), low=list(means), high=list(means))


def handoff(start: float, end: float, half: float, student: float | None = 0.1) -> Handoff:
    return Handoff(
        fractions=[0.0, 0.9],
        teacher=curve(start, end),
        student=None if student is None else estimate(student),
        fall=estimate(start - end, half),
        problems=8,
        continuations=2,
    )


def positions(first_30: float, half: float = 0.01, size: float = 0.5) -> Positions:
    return Positions(
        edges=[0.0, 0.5, 1.0],
        tokens=[4, 4],
        **{name: curve(0.6, 0.4) for name in ("abs_gap", "gap", "kl", "share", "kl_share")},
        mean_abs_gap=estimate(size),
        mean_kl=estimate(size),
        half=estimate(0.4, 0.01),
        first_30=estimate(first_30, half),
    )


def probe(**parts: Any) -> Probe:
    about = Rollouts(prompts=8, rollouts=8, empty=0, truncated=0, mean_tokens=12.0)
    return Probe(iwopd="0", student="s", teacher="t", settings={}, rollouts=about, **parts)


@pytest.mark.parametrize(
    ("parts", "bias", "words"),
    [
        ({"handoff": handoff(0.9, 0.3, 0.1)}, "strong", "60 points less (50 to 70)"),
        ({"handoff": handoff(0.9, 0.3, 0.7)}, "unclear", "cannot tell"),
        ({"handoff": handoff(0.9, 0.8, 0.05)}, "moderate", "There is a position bias"),
        ({"handoff": handoff(0.9, 0.9, 0.04)}, "none", "hardly cost"),
        ({"handoff": handoff(0.9, 0.89, 0.08)}, "unclear", "cannot tell"),
        ({"handoff": handoff(0.2, 0.1, 0.01, student=0.19)}, "unclear", "no better"),
        ({"handoff": handoff(0.9, 0.3, 0.1, student=None)}, "strong", "60 points"),
        ({"positions": positions(0.6)}, "strong", "a sign of a strong position bias"),
        ({"positions": positions(0.6, half=0.3)}, "unclear", "does not come early"),
        ({"positions": positions(0.4)}, "moderate", "rather early"),
        ({"positions": positions(0.3)}, "unclear", "only a checker can tell"),
        ({"positions": positions(0.9, size=0.01)}, "none", "hardly disagree"),
        ({}, "unmeasurable", "Nothing was measured"),
    ],
)
def test_each_verdict(parts: dict[str, Any], bias: str, words: str) -> None:
    found, sentences = judge(probe(**parts), 0.5)
    text = " ".join(sentences)
    assert found == bias, text
    assert words in text
    assert (PLAIN in sentences) == (bias == "none")


def test_the_checker_has_the_last_word() -> None:
    """A front-loaded discrepancy that costs nothing is no bias."""
    bias, sentences = judge(probe(handoff=handoff(0.9, 0.9, 0.01), positions=positions(0.9)), 0.5)
    assert bias == "none"
    assert any("Half of the discrepancy is spent by 40 % of an answer (39 to 41)" in sentence for sentence in sentences)


def alignment(**gains: Estimate) -> Alignment:
    rules = [Aligned(key="opd", title="OPD", cosine=estimate(0.2))]
    rules += [Aligned(key=key, title=key, cosine=estimate(0.2), gain=gain) for key, gain in gains.items()]
    keys = ("before", "at", "until", "after")
    regions = [
        Aligned(key=key, title=key, cosine=estimate(cosine)) for key, cosine in zip(keys, (0.3, 0.4, 0.5, 0.1), strict=True)
    ]
    return Alignment(batches=4, batch_prompts=8, rules=rules, regions=regions)


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ({"iw-opd-0.5": estimate(0.02, 0.01)}, "IW-OPD with gamma 0.5 raises the update's cosine"),
        ({"iw-opd-0.5": estimate(-0.02, 0.01)}, "IW-OPD with gamma 0.5 lowers"),
        ({"iw-opd-0.5": estimate(0.02, 0.03)}, "does not clearly change"),
        ({"iw-opd-0.5": Estimate(mean=0.02)}, "one batch: no interval"),
        ({"iw-opd-0.5": estimate(0.02, 0.01), "iw-opd-4": estimate(0.05, 0.01)}, "gammas tried, 4 gains most (+0.050"),
        (
            {
                "iw-opd-0.5": estimate(0.02, 0.01),
                "iw-opd-4": estimate(0.05, 0.01),
                "linear-decay-4": estimate(0.06, 0.01),
            },
            "Linear decay, which does not look at the gap, gains as much",
        ),
    ],
)
def test_what_gamma_would_change(gains: dict[str, Estimate], words: str) -> None:
    _, sentences = judge(probe(handoff=handoff(0.9, 0.3, 0.1), alignment=alignment(**gains)), 0.5)
    assert words in " ".join(sentences)


def test_the_verdict_names_the_drift() -> None:
    share = estimate(0.5)
    drift = Drift(
        threshold=2.0, rollouts=estimate(0.9), position=share, before=share, at=share, until=share, after=estimate(0.8)
    )
    parts = {"handoff": handoff(0.9, 0.3, 0.1), "drift": drift, "alignment": alignment(**{"iw-opd-0.5": estimate(0.0, 0.1)})}
    text = " ".join(judge(probe(**parts), 0.5)[1])
    assert "90 % of the rollouts drift" in text
    assert "hold 80 % of the discrepancy" in text
    assert "+0.100 ± 0.000" in text


def agreement(mean: float, half: float | None) -> Agreement:
    cosine = Estimate(mean=mean) if half is None else estimate(mean, half)
    return Agreement(batches=8, batch_prompts=32, cosine=cosine, gate=gate(mean))


@pytest.mark.parametrize(
    ("mean", "half", "words"),
    [
        (0.33, 0.05, "pull the same way as those before it (agreement +0.33, +0.28 to +0.38): they teach, and uniform weights"),
        (0.2, 0.05, "(agreement +0.20, +0.15 to +0.25): they teach in part, and gated weights let them count 50 %."),
        (-0.05, 0.1, "pull elsewhere or back (agreement −0.05, −0.15 to +0.05): survival weights leave them out."),
        (0.1, 0.05, "cannot be told (agreement +0.10, +0.05 to +0.15; they begin to count at +0.10). More prompts would."),
        (0.9, None, "cannot be told (agreement +0.90; one batch)."),
    ],
)
def test_the_verdict_says_whether_tokens_after_a_drift_teach(mean: float, half: float | None, words: str) -> None:
    for parts in ({"handoff": handoff(0.9, 0.3, 0.1)}, {}):
        assert words in " ".join(judge(probe(agreement=agreement(mean, half), **parts), 0.5)[1])


def test_the_agreement_is_printed_and_an_old_file_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = probe(agreement=agreement(0.2, 0.05))
    print_probe(found, Console(width=150))
    text = " ".join(capsys.readouterr().out.split())
    assert "before and after drifts, 8 batches of 32 prompts" in text
    assert "agreement │ +0.200 ± 0.050 │ 50" in text
    write_probe(found, tmp_path / "probe.json")
    assert read_probe(tmp_path) == found
    values = json.loads((tmp_path / "probe.json").read_text())
    del values["agreement"]
    (tmp_path / "probe.json").write_text(json.dumps(values))
    assert read_probe(tmp_path).agreement is None


def split_alignment() -> Alignment:
    verdicts = [ByVerdict(key="opd", title="OPD", right=estimate(0.1), wrong=estimate(0.4), difference=estimate(0.3, 0.1))]
    return alignment(**{"iw-opd-0.5": estimate(0.0, 0.1)}).model_copy(update={"verdicts": verdicts, "compared": 9})


def test_the_verdict_and_the_tables_tell_right_from_wrong_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    found = probe(handoff=handoff(0.9, 0.3, 0.1), alignment=split_alignment())
    text = " ".join(judge(found, 0.5)[1])
    assert "On wrong rollouts OPD's update has a cosine of +0.400" in text
    assert "(difference +0.300 ± 0.100)" in text
    print_probe(found, Console(width=150))
    text = " ".join(capsys.readouterr().out.split())
    assert "on right and on wrong rollouts (9 of each)" in text
    assert "wrong minus right" in text
    print_probe(found.model_copy(update={"alignment": alignment()}), Console(width=150))
    assert "wrong minus right" not in capsys.readouterr().out


def test_a_probe_from_before_the_split_is_read(tmp_path: Path) -> None:
    write_probe(probe(alignment=split_alignment()), tmp_path / "probe.json")
    values = json.loads((tmp_path / "probe.json").read_text())
    assert values["alignment"]["compared"] == 9
    del values["alignment"]["verdicts"], values["alignment"]["compared"]
    (tmp_path / "probe.json").write_text(json.dumps(values))
    found = read_probe(tmp_path).alignment
    assert found is not None
    assert (found.verdicts, found.compared) == ([], 0)


def test_a_probe_survives_its_file(tmp_path: Path) -> None:
    before = probe(handoff=handoff(0.9, 0.3, 0.1), positions=positions(0.4), missing={"alignment": "no solutions"})
    write_probe(before, tmp_path / "new" / "probe.json")
    assert read_probe(tmp_path / "new") == before == read_probe(tmp_path / "new" / "probe.json")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["probe.json"]


def test_no_number_is_null_not_nan(tmp_path: Path) -> None:
    found = probe(handoff=handoff(math.nan, 0.3, math.inf))
    assert found.handoff is not None
    assert found.handoff.teacher.mean == [None, 0.3]
    write_probe(found, tmp_path / "probe.json")
    text = (tmp_path / "probe.json").read_text()
    values = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert values["handoff"]["teacher"]["mean"] == [None, 0.3]
    assert values["handoff"]["fall"] == {"mean": None, "low": None, "high": None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is not a probe"),
        (b'{"format": 9}', "has format 9, this version reads 1"),
        (b'{"format": 1, "student": 3}', "iwopd"),
    ],
)
def test_a_file_that_is_no_probe_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    with pytest.raises(ProbeError, match=words) as refused:
        read_probe(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="cannot read the probe"):
        read_probe(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_tokens": 0}, "--max-tokens must be at least 1"),
        ({"batch_prompts": 0}, "--batch-size must be at least 1"),
        ({"temperature": 0.0}, "--temperature must be positive"),
        ({"drift": -1.0}, "--drift must be positive"),
        ({"gamma": math.nan}, "--gamma"),
        ({"fractions": (0.0, 1.0)}, r"--fractions must lie in \[0, 1\)"),
        ({"fractions": (0.3, 0.1)}, "must rise"),
        ({"fractions": ()}, "got none"),
        ({"skip": frozenset({"hand-off"})}, "the parts are handoff, positions"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        ProbeSettings(**{"max_tokens": 8, **settings})


def test_bars_and_tables_print_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert bar(0.5, 1.0, 4) == "██"
    assert bar(0.5, 1.0, 1) == "▌"
    assert bar(2.0, 1.0, 2) == "██"
    assert bar(-1.0, 1.0) == bar(None, 1.0) == bar(1.0, 0.0) == ""
    found = probe(handoff=handoff(math.nan, 0.3, 0.1, student=None), positions=positions(0.4), missing={"rules": "[none]"})
    print_probe(found, Console(width=150))
    text = " ".join(capsys.readouterr().out.split())
    assert "not measured: rules ([none])" in text
    assert "right answers in percent" in text

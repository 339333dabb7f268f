"""Does the probe predict? Made-up records whose answers are worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from iwopd.algo.ranking import ranks, spearman
from iwopd.analysis.advice import advise
from iwopd.analysis.prediction import (
    FAMILIES,
    KEYS,
    SAMPLED,
    WHOLE,
    Chooser,
    choosers,
    first_batches,
    gate_record,
    method_of,
    method_section,
    over_pairs,
    pairs_of,
    rank_agreement,
    regret,
    regrets,
    split_half,
)
from iwopd.analysis.probe.result import Estimate
from iwopd.analysis.reproduce.prediction import (
    PROBES,
    PredictionError,
    prediction_section,
    probe_world,
    read_probes,
    reproduce_prediction,
    unprobed,
)
from iwopd.cli import main
from iwopd.methods import TITLES

SAMPLES, DISTRIBUTIONS = FAMILIES
COSINE = Chooser("largest cosine", "cosine", 0.0)


def run(world: str, lineage: int, title: str, accuracy: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"world": world, "lineage": lineage, "seed": seed, "title": title, "accuracy": {"40": accuracy}, **more}


def trained(world: str, lineage: int, opd: float, iw: float, survival: float) -> list[dict[str, Any]]:
    values = {"OPD": opd, "IW-OPD": iw, "Survival (ours)": survival}
    return [run(world, lineage, title, value) for title, value in values.items()]


def probed(world: str, lineage: int, opd: float, iw: float, survival: float, agreement: float | None = None) -> dict[str, Any]:
    cosines = {"opd": opd, "iw-opd": iw, "survival": survival}
    return {"world": world, "lineage": lineage, "cosines": cosines, "agreement": agreement}


def test_ranks_share_their_places() -> None:
    assert ranks([10.0, 30.0, 20.0, 20.0]) == [1.0, 4.0, 2.5, 2.5]
    assert ranks([]) == []


@pytest.mark.parametrize(
    ("first", "second", "rho"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 2, 2], [1, 2, 3], math.sqrt(0.75)),  # ranks 1, 2.5, 2.5: 1.5 / sqrt(1.5 * 2)
    ],
)
def test_spearman(first: list[float], second: list[float], rho: float) -> None:
    assert spearman(first, second) == pytest.approx(rho)


def test_no_ranking_has_no_correlation() -> None:
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    with pytest.raises(ValueError, match="equal lengths"):
        spearman([1.0], [1.0, 2.0])


def test_every_method_has_a_title() -> None:
    named = {name for name in (*SAMPLED, *WHOLE) if not name.startswith(("iw-opd-", "linear-decay-"))}
    assert {KEYS[TITLES[name]] for name in named} == named
    assert set(KEYS.values()) == {*SAMPLED, *WHOLE}


def test_pairs_average_seeds_and_keep_to_one_set_of_settings() -> None:
    slow, fast = {"settings": {"optim.lr": 1e-4}}, {"settings": {"optim.lr": 2e-4}}
    survival = {"settings": {"optim.lr": 1e-4, "method.weights": "survival", "method.params": {"tau": 1.0}}}
    other = {"settings": {"optim.lr": 1e-4, "method.weights": "survival", "method.params": {"tau": 9.0}}}
    gone = {"settings": {"optim.lr": 1e-4, "method.weights": "of a plug-in"}}
    runs = [
        run("drift", 12, "OPD", 20.0, 0, **slow),
        run("drift", 12, "OPD, optim.lr 0.0001", 30.0, 1, **slow),  # whatever its title
        run("drift", 12, "OPD", 99.0, 0, **fast),  # fewer of them: not looked at
        run("drift", 12, "nobody's name", 60.0, 0, **survival),
        run("drift", 12, "Survival (ours)", 99.0, 0, **other),  # not the method of that name
        run("drift", 12, "OPD", 99.0, 0, **gone),
        run("drift", 12, "OPD, lr x 2", 99.0),  # no settings, and no title of a method
        run("drift", 13, "OPD", 50.0, 0, **slow),  # not probed
    ]
    probes = [
        {"world": "drift", "lineage": 12, "alignment": {"rules": {"iw-opd-0.5": [0.25, 0.2, 0.3], "opd": [None, None, None]}}},
        {"world": "drift", "lineage": 12, "agreement": -0.1},
        {"world": "drift", "lineage": 14, "agreement": 0.5},  # not trained
    ]
    (pair,) = pairs_of(runs, probes)
    assert (pair.world, pair.lineage, pair.agreement) == ("drift", 12, -0.1)
    assert pair.cosines == {"iw-opd": 0.25}
    assert pair.accuracy == {"opd": {40: 25.0}, "survival": {40: 60.0}}


def test_runs_are_known_by_their_settings() -> None:
    for name in (*SAMPLED, *WHOLE):
        settings = {f"method.{key}": value for key, value in method_section(name).items()}
        assert method_of({"settings": settings}) == name
    assert method_of({"settings": {"method.weights": "suffix-only"}}) is None


def test_rank_correlation_by_pair_world_and_over_all() -> None:
    runs = [one for place in (("a", 0), ("a", 1), ("b", 0), ("b", 1)) for one in trained(*place, 10, 20, 30)]
    probes = [probed("a", 0, 0.1, 0.2, 0.3), probed("a", 1, 0.3, 0.2, 0.1), probed("b", 0, 0.1, 0.3, 0.2)]
    probes.append(probed("b", 1, 0.1, 0.3, 0.2))
    found = rank_agreement(pairs_of(runs, probes), SAMPLES, 40)
    wanted = {("a", 0): 1, ("a", 1): -1, ("b", 0): 0.5, ("b", 1): 0.5}
    assert {place: pytest.approx(rho) for place, rho in found.by_pair.items()} == wanted
    assert found.overall.mean == pytest.approx(1 / 4)
    spread = math.sqrt((0.75**2 + 1.25**2 + 2 * 0.25**2) / 3)
    assert found.overall.high == pytest.approx(1 / 4 + 3.182446 * spread / math.sqrt(4), rel=1e-5)  # t of three degrees
    assert found.by_world["a"].mean == pytest.approx(0)
    assert found.by_world["b"].low is None


def test_two_methods_are_no_ranking() -> None:
    pairs = pairs_of(trained("a", 0, 10, 20, 30)[:2], [probed("a", 0, 0.1, 0.2, 0.3)])
    assert rank_agreement(pairs, SAMPLES, 40).by_pair == {}


def test_regret_of_the_probe_and_of_always_one_method() -> None:
    runs = trained("a", 0, 50, 55, 70) + trained("b", 0, 60, 58, 40)
    probes = [probed("a", 0, 0.1, 0.2, 0.3), probed("b", 0, 0.25, 0.3, 0.1)]
    ours, *rivals = regrets(pairs_of(runs, probes), COSINE, SAMPLES, 40)
    assert dict(ours.by_pair) == {("a", 0): 0, ("b", 0): 2}
    assert ours.mean.mean == 1
    means = {one.chooser.value: (one.mean.mean, one.difference.mean if one.difference else None) for one in rivals}
    assert means == {"opd": (10.0, -9.0), "iw-opd": (8.5, -7.5), "survival": (10.0, -9.0)}


def test_the_margin_falls_back_to_uniform_weights() -> None:
    (pair,) = pairs_of(trained("a", 0, 50, 55, 70), [probed("a", 0, 0.20, 0.24, 0.1)])
    chosen = [one.choose(pair, SAMPLES, 40) for one in choosers() if one.statistic == "cosine"]
    assert chosen == ["iw-opd", "iw-opd", "opd", "opd"]


def test_the_agreement_chooses_between_two() -> None:
    runs, probes = trained("a", 0, 50, 55, 70), [probed("a", 0, 0.2, 0.3, 0.1, 0.15)]
    (pair,) = pairs_of(runs, probes)
    chosen = [one.choose(pair, SAMPLES, 40) for one in choosers() if one.statistic == "agreement"]
    assert chosen == ["opd", "opd", "survival", "survival"]  # thresholds 0, 0.1, 0.2, 0.3
    (blind,) = pairs_of(runs, [probed("a", 0, 0.2, 0.3, 0.1)])
    assert all(one.choose(blind, SAMPLES, 40) is None for one in choosers() if one.statistic == "agreement")
    (untrained,) = pairs_of(runs[:2], probes)
    assert Chooser("", "agreement", 0.3).choose(untrained, SAMPLES, 40) is None  # survival was not trained


def test_how_often_the_gate_is_right() -> None:
    runs = trained("a", 0, 50, 0, 70) + trained("a", 1, 50, 0, 60) + trained("b", 0, 50, 0, 40) + trained("b", 1, 50, 0, 55)
    agreements = [("a", 0, -0.3), ("a", 1, 0.05), ("b", 0, 0.4), ("b", 1, 0.2)]
    probes = [probed(world, lineage, 0, 0, 0, agreement) for world, lineage, agreement in agreements]
    found = gate_record(pairs_of(runs, probes), SAMPLES, 40, 0.1)
    assert (found.right, found.pairs, found.correlation) == (3, 4, -1.0)


def halves(even: int, odd: int, *, odd_agreement: float = -0.2) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Even lineages: survival is best by 20 and the agreement knows it, the cosine names OPD. Odd ones: `odd_agreement`."""
    lineages = [2 * number for number in range(even)] + [2 * number + 1 for number in range(odd)]
    runs = [one for lineage in lineages for one in trained("w", lineage, 50, 54 + lineage % 3, 70)]
    probes = [probed("w", one, 0.3, 0.2, 0.1, odd_agreement if one % 2 else -0.2) for one in lineages]
    return runs, probes


def test_chosen_on_even_lineages_and_reported_on_odd_ones() -> None:
    found = split_half(pairs_of(*halves(4, 5)), SAMPLES, 40)
    assert found is not None
    assert (found.chosen.statistic, found.chosen.value) == ("agreement", 0.0)  # the first of four equally good thresholds
    assert {one.chooser.name: one.mean.mean for one in found.tried}["largest cosine"] == 20
    assert len(found.reported[0].by_pair) == 5
    assert [one.mean.mean for one in found.reported if one.chooser.value != "iw-opd"] == [0.0, 20.0, 0.0]


def test_the_report_is_not_of_the_half_that_chose() -> None:
    """On odd lineages the agreement misleads: what was chosen on even ones loses all 20 points there."""
    found = split_half(pairs_of(*halves(4, 4, odd_agreement=0.8)), SAMPLES, 40)
    assert found is not None
    assert found.reported[0].mean.mean == 20


@pytest.mark.parametrize(("even", "odd"), [(3, 8), (8, 3), (0, 0)])
def test_halves_that_are_too_small(even: int, odd: int) -> None:
    assert split_half(pairs_of(*halves(even, odd)), SAMPLES, 40) is None
    if even:
        assert any("too few to tell" in line for line in prediction_section(*halves(even, odd)).words)


def test_a_way_of_choosing_that_fails_on_some_pairs_is_not_compared() -> None:
    runs, probes = halves(5, 4)
    probes[0]["agreement"] = None
    found = split_half(pairs_of(runs, probes), SAMPLES, 40)
    assert found is not None
    assert found.chosen.statistic == "cosine"


def test_whole_distributions_are_their_own_family() -> None:
    values = {"Reverse KL": 60.0, "Reverse KL, survival (ours)": 80.0, "Reverse KL, gated (ours)": 81.0, "OPD": 99.0}
    runs = [run("w", 0, title, value) for title, value in values.items()]
    pairs = pairs_of(runs, [{"world": "w", "lineage": 0, "agreement": -0.5}])
    assert regret(pairs, Chooser("", "agreement", 0.1), DISTRIBUTIONS, 40).mean.mean == 1


def test_the_section_says_what_it_found() -> None:
    section = prediction_section(*halves(4, 4))
    assert section.key == "prediction"
    assert section.numbers["pairs"] == 8
    assert section.numbers["sampled"]["chosen"] == "survival where the agreement is below 0"
    assert section.numbers["sampled"]["correlation"][40]["mean"] == -1
    text = "\n".join(section.words)
    assert "a lineage in its world" in text
    assert "in 8 of 8 pairs" in text
    assert "always OPD: -20.0 (-20.0 to -20.0), loses less" in text
    assert "whole distributions: no pair" in text
    assert all(len(row) == len(table.columns) for table in section.tables for row in table.rows)


def test_a_section_of_nothing() -> None:
    assert prediction_section([], []).numbers == {"pairs": 0}


def test_records_are_read_and_only_what_is_missing_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, probes = halves(1, 1)
    (tmp_path / "runs-w.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    (tmp_path / PROBES).write_text(json.dumps(probes[0]) + "\n")
    (tmp_path / "probes.jsonl").write_text(json.dumps({"world": "w", "lineage": 1, "alignment": {"rules": {}}}) + "\n")
    assert unprobed(runs, read_probes(tmp_path)) == [("w", 1, "null")]
    asked = []

    def probe_world(world: str, lineage: int, models: str) -> dict[str, Any]:
        asked.append((world, lineage))
        return probes[1]

    monkeypatch.setattr("iwopd.analysis.reproduce.prediction.probe_world", probe_world)
    quiet = Console(quiet=True)
    assert reproduce_prediction(tmp_path, quiet, measure=False).numbers["pairs"] == 2
    assert asked == []
    reproduce_prediction(tmp_path, quiet)
    reproduce_prediction(tmp_path, quiet)
    assert asked == [("w", 1)]


def test_a_probe_belongs_to_the_models_that_were_trained() -> None:
    """A lineage has other weights on another kind of processor."""
    here, elsewhere = {"student": "a", "teacher": "b"}, {"student": "a", "teacher": "c"}
    runs = [{**one, "models": here} for one in trained("w", 0, 1.0, 2.0, 3.0)]
    probe = probed("w", 0, 0.1, 0.2, 0.3)
    for other in (elsewhere, None):
        strange = {**probe, "models": other}
        assert pairs_of(runs, [strange]) == []
        assert unprobed(runs, [strange]) == [("w", 0, json.dumps(here))]
    assert len(pairs_of(runs, [{**probe, "models": elsewhere}, {**probe, "models": here}])) == 1


def test_a_run_tells_of_the_pair_before_its_first_update() -> None:
    """Without a probe: the agreement of its first batch, under uniform weights and whole distributions."""
    runs = trained("w", 0, 10.0, 11.0, 30.0) + trained("w", 1, 30.0, 20.0, 10.0)
    seen = {0: [-0.3, 0.9], 1: [0.4, -0.9]}
    runs += [run("w", lineage, TITLES["kl"], 20.0, agreement=values) for lineage, values in seen.items()]
    runs += [run("w", 0, TITLES["kl-survival"], 25.0, agreement=[0.8]), run("w", 2, TITLES["kl"], 5.0, agreement=[None])]
    assert [(one["lineage"], one["agreement"]) for one in first_batches(runs)] == [(0, -0.3), (1, 0.4)]
    assert [one["agreement"] for one in first_batches(runs, 2)] == [pytest.approx(0.3), pytest.approx(-0.25)]
    assert first_batches(runs, 3) == []
    section = prediction_section(runs, [])
    assert section.numbers["pairs"] == 2
    assert section.words[1].startswith("2 of them have no probe")
    found = regrets(pairs_of(runs, first_batches(runs)), Chooser("", "agreement", 0.1), SAMPLES, 40)
    assert found[0].by_pair == {("w", 0): 0.0, ("w", 1): 0.0}
    probe = probed("w", 0, 0.1, 0.2, 0.3, agreement=0.5)  # a probe counts more
    assert "1 of them have no probe" in prediction_section(runs, [probe]).words[1]


def test_intervals_take_four_pairs() -> None:
    assert over_pairs([1.0, 2.0, 3.0]) == Estimate(mean=2.0)
    assert over_pairs([]) == Estimate(mean=None)
    four = over_pairs([0.0, 0.0, 0.0, 4.0], least=0.0)
    assert (four.mean, four.low) == (1.0, 0.0)
    assert four.high is not None


@pytest.mark.parametrize(("models", "why"), [("null", "do not name their models"), ('{"student": "a"}', "began from other")])
def test_only_the_models_of_the_runs_are_probed(models: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        weights: ClassVar = {"student": "b", "teacher": "c"}

    monkeypatch.setattr("iwopd.tiny.open_world", lambda recipe, progress: Opened())
    with pytest.raises(PredictionError, match=rf"the runs of world clean, lineage 0 {why}.*--results"):
        probe_world("clean", 0, models)


def test_the_command_prints_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, probes = halves(4, 4)
    (tmp_path / "runs-w.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    (tmp_path / PROBES).write_text("".join(json.dumps(one) + "\n" for one in probes))
    page = tmp_path / "page.md"

    def said(*words: str, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", "prediction", *words])
        assert ended.value.code == code
        return capsys.readouterr()

    out, _ = said("--results", str(tmp_path), "--markdown", str(page), "--json")
    assert json.loads(out)["prediction"]["numbers"]["sampled"]["regret"]["always OPD"]["mean"] == 20
    assert "| largest cosine | 20.0 (20.0 to 20.0) | 20.0 | 8 |" in page.read_text()
    assert "name their folder with --results" in said("--results", str(tmp_path / "none"), code=2)[1]
    assert "ask for p1 in another call" in said("p1", "--results", str(tmp_path), code=2)[1]


@pytest.mark.parametrize("line", ["{", "[]", '{"world": "w"}'])
def test_damaged_records_are_named(line: str, tmp_path: Path) -> None:
    (tmp_path / PROBES).write_text(line + "\n")
    with pytest.raises(PredictionError, match=r"pair-probes.jsonl, line 1 .*remove it"):
        read_probes(tmp_path)


def test_advice() -> None:
    low, high = advise({"agreement": -0.25}), advise({"agreement": 0.1})
    assert low.method == "survival"
    assert high.method == "opd"
    assert "-0.25, below 0.1" in low.words
    assert "leaves it open" not in low.words
    assert (
        "(-0.40 to +0.20), below 0.1; its interval leaves it open"
        in advise({"agreement": -0.1, "agreement_interval": [-0.4, 0.2]}).words
    )
    unsure = advise({"agreement": 0.3, "agreement_interval": [-0.1, 0.7]})
    assert unsure.method == "survival"  # wrong advice costs more the other way
    assert "at least 0.1; its interval leaves it open" in unsure.words
    assert advise({"agreement": 0.3, "agreement_interval": [0.2, 0.4]}).method == "opd"
    assert advise({"agreement": 0.0}, DISTRIBUTIONS).method == "kl-survival"
    assert advise({"agreement": 0.5}, DISTRIBUTIONS).method == "kl"
    with pytest.raises(ValueError, match="no agreement"):
        advise({"agreement": None})

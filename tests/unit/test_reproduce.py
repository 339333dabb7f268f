"""Reproduction tables from run directories with known scores: what is read, paired and said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.analysis.probe.result import Curve, Estimate, Handoff, Probe, Rollouts
from iwopd.analysis.reproduce import horizons, rivals, tokenizers
from iwopd.analysis.reproduce.items import ITEMS
from iwopd.analysis.reproduce.records import Record, probe_record
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import in_words, markdown, show, signed
from iwopd.analysis.reproduce.variants import IW_MEAN_ONE, IW_OPD, OPD, OPD_FASTER, PREFIX, SUFFIX, Variant, sized, taught
from iwopd.cli import main
from iwopd.errors import UserError
from iwopd.report.reproduction import learning_chart, write_figures
from iwopd.runs.directory import RunDirectory
from iwopd.runs.identity import run_key

PROBLEMS = 60


def write_run(runs: Runs, variant: Variant, accuracy: float, swing: float = 0.0) -> None:
    """Finished runs whose first problems are right: their share grows to `accuracy`, in odd lineages `swing` more."""
    for lineage, seed in runs.members:
        job = runs.planned(variant, lineage, seed)
        if (job.folder / "run.json").exists():
            continue
        run = RunDirectory(job.folder)
        run.create(job.config, "data")
        for step in range(1, runs.steps + 1):
            written = {"rollouts": job.config.rollout.prompts_per_step, "rollout/length_mean": 50.0}
            run.append("metrics.jsonl", {"step": step, "kl/sampled": 2.0 / step, "time/rollout": 0.25, **written})
        for step in range(0, runs.steps + 1, 10):
            right = round(PROBLEMS * (accuracy + swing * (lineage % 2)) * step / runs.steps) + seed
            scores = [[1.0] if place < right else [0.0] for place in range(PROBLEMS)]
            ids = [str(place) for place in range(PROBLEMS)]
            mean = sum(row[0] for row in scores) / PROBLEMS
            run.append("evals.jsonl", {"step": step, "task": "tiny", "mean": mean, "problem_ids": ids, "scores": scores})


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path, lineages=(0, 1, 2, 3), seeds=(0, 1), problems=PROBLEMS)


def test_runs_are_named_by_what_decides_them(runs: Runs) -> None:
    one = runs.config(OPD, 0, 0)
    assert run_key(one) == run_key(one.model_copy(update={"tracking": one.tracking.model_copy(update={"console": "live"})}))
    keys = {run_key(runs.config(v, lineage, seed)) for v in (OPD, IW_OPD, OPD_FASTER) for lineage, seed in runs.members}
    assert len(keys) == 24
    assert runs.config(OPD_FASTER, 0, 0).optim.lr == pytest.approx(1.25e-4)
    # The default size and teacher are not runs of their own.
    assert (
        runs.planned(sized(OPD, "medium"), 0, 0).folder
        == runs.planned(OPD, 0, 0).folder
        == runs.planned(taught(OPD, "strong"), 0, 0).folder
    )
    assert runs.planned(sized(OPD, "small"), 0, 0).folder != runs.planned(OPD, 0, 0).folder
    assert len(runs.all_planned([OPD, IW_OPD, sized(OPD, "medium")])) == 16


def test_differences_are_paired_by_lineage_and_seed(runs: Runs) -> None:
    write_run(runs, OPD, 0.5, swing=0.2)
    write_run(runs, IW_OPD, 0.6, swing=0.2)
    assert runs.by_lineage(IW_OPD, 40) == pytest.approx({0: 60.833, 1: 80.833, 2: 60.833, 3: 80.833}, abs=1e-3)
    effect = runs.effect(IW_OPD, OPD, 40)
    assert effect.interval == pytest.approx((10.0, 10.0, 10.0), abs=1e-2)  # whatever the lineages themselves do
    assert (effect.units, effect.established) == (4, True)
    accuracy = runs.accuracy(OPD, 40)
    assert accuracy.mean == pytest.approx(60.833, abs=1e-3)
    assert accuracy.high - accuracy.mean == pytest.approx(3.18245 * 20 / 3**0.5 / 2, rel=1e-4)  # t of 3 degrees of freedom
    assert torch.equal(runs.kl(OPD)[0, :2], torch.tensor([2.0, 1.0], dtype=torch.float64))


def test_only_lineages_and_seeds_that_both_have_are_compared(runs: Runs) -> None:
    write_run(runs, OPD, 0.5)
    write_run(replace(runs, lineages=(0, 1)), IW_OPD, 0.6)
    write_run(replace(runs, lineages=(2,), seeds=(1,)), IW_OPD, 0.7)
    assert runs.difference(IW_OPD, OPD, 40) == pytest.approx({0: 10.0, 1: 10.0, 2: 20.0}, abs=1e-2)
    effect = runs.effect(IW_OPD, OPD, 40)
    assert (effect.units, effect.enough, effect.established) == (3, False, False)
    assert signed(effect) == "+13.3, too few to tell"
    assert in_words("It", effect) == "It: +13.3 points over 3 lineages: too few to tell, a verdict takes 4."
    assert in_words("It", runs.effect(PREFIX, OPD, 40)) == ""
    assert show(runs.accuracy(PREFIX, 40)) == "not run"
    assert runs.missing([OPD, IW_OPD, PREFIX]) == [
        "IW-OPD (lineage 2 seed 0, lineage 3 seed 0, lineage 3 seed 1)",
        "Prefix-30",
    ]


def test_an_item_is_one_family(runs: Runs) -> None:
    """Its table and its sentences are corrected for each other, a comparison that is made twice counts once."""
    for variant, accuracy, swing in ((OPD, 0.5, 0.0), (IW_OPD, 0.6, 0.12), (OPD_FASTER, 0.5, 0.0), (IW_MEAN_ONE, 0.5, 0.0)):
        write_run(runs, variant, accuracy, swing)
    alone = runs.effect(IW_OPD, OPD, 40)
    assert 0.01 < alone.p_value < 0.05  # 10, 22, 10, 22 points
    section = ITEMS["p3"].section(runs, {})
    (row,) = (row for row in section.tables[0].rows if row[0] == "IW-OPD")
    p_value = section.numbers["methods"]["IW-OPD"]["p"]
    assert p_value == pytest.approx(min(1.0, 7 * alone.p_value), rel=0.2)  # six differences in the table, one more in words
    assert row[-1] == f"{p_value:.3f}"
    assert section.tables[0].columns[-1] == "Holm's p"
    said = next(one for one in section.words if one.startswith("IW-OPD minus OPD at step 40"))
    assert f"over 4 lineages (Holm's p of 7 {p_value:.3f}): not established after Holm's correction over 7 comparisons." in said
    assert "established" not in " ".join(one for one in section.words if "Holm's correction" not in one)


def test_a_finished_run_is_known_as_such(runs: Runs) -> None:
    job = runs.planned(OPD, 0, 0)
    found = [job.finished]
    write_run(runs, OPD, 0.5)
    found.append(job.finished)
    log = job.folder / "evals.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    found.append(job.finished)  # the last evaluation is missing
    assert found == [False, True, False]


def probe(fall: float) -> Probe:
    curve = Curve(mean=[0.9, 0.9 - fall], low=[0.8, 0.1], high=[1.0, 0.9])
    handoff = Handoff(
        fractions=[0.0, 0.9],
        teacher=curve,
        student=Estimate(mean=0.3),
        fall=Estimate(mean=fall, low=fall - 0.1, high=fall + 0.1),
        problems=10,
        continuations=2,
    )
    about = Rollouts(prompts=10, rollouts=10, empty=0, truncated=0, mean_tokens=5.0)
    return Probe(iwopd="0", student="s", teacher="t", settings={}, rollouts=about, handoff=handoff)


def probes(*falls: float) -> dict[int, Record]:
    return {lineage: probe_record(probe(fall), "clean", lineage, 10) for lineage, fall in enumerate(falls)}


def test_every_item_has_a_section(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "teacher_accuracy", lambda *_: 99.0)
    runs = replace(runs, seeds=(0,))
    for item in ITEMS.values():
        for place, variant in enumerate(item.trained(runs.world)):
            write_run(runs, variant, 0.3 + 0.02 * place)
        for variant in item.halved.get(runs.world, ()):
            write_run(replace(runs, steps=20), variant, 0.3)
    assert list(ITEMS) == [
        *(f"p{number}" for number in range(1, 11)),
        "own",
        "objectives",
        "divergences",
        "thresholds",
        "horizons",
        "tokenizers",
        "rivals",
        "gate",
        "rates",
        "updates",
    ]
    for lineage in runs.lineages:
        runs.noise_file(lineage).write_text(json.dumps({one.title: [2.0, 1.0, 16] for one in ITEMS["objectives"].noise_of}))
    for item in ITEMS.values():
        section = item.section(runs, probes(0.6, 0.5, 0.55, 0.5))
        text = markdown(section)
        assert "not run" not in text.lower()
        assert text.startswith(f"### {item.key.upper()}: ")
        assert section.words
        for table in section.tables:
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_lineages_are_the_units_of_horizons(runs: Runs) -> None:
    """Seeds are averaged within a lineage; tokens are compared over the steps that both have."""
    four, (test, _) = replace(runs, lineages=(0, 1, 2, 3)), horizons.TESTED["clean"]
    for variant, accuracy in ((test.whole, 0.5), (test.ours, 0.55)):
        write_run(four, variant, accuracy)
    half = replace(four, steps=20)
    write_run(half, test.control, 0.4)
    late = four.effect(test.ours, test.whole, 40)
    assert late.units == 4
    assert late.interval.mean == pytest.approx(5.0, abs=1e-2)
    assert late.interval.low == pytest.approx(5.0, abs=1e-2)  # the same in every lineage
    assert horizons.share_written(half, test.control, test.whole, of=four) == pytest.approx(30 / 64)
    assert horizons.share_written(four, test.ours, test.whole) == 1.0


def test_fewer_than_four_lineages_give_no_verdict(runs: Runs) -> None:
    for count in (2, 4):
        some = replace(runs, lineages=tuple(range(count)))
        for test in horizons.TESTED["clean"]:
            write_run(some, test.whole, 0.5)
            write_run(some, test.ours, 0.6)
            write_run(horizons.halfway(some), test.control, 0.2)
        words = " ".join(horizons.registered(some))
        assert ("too few to tell" in words) == (count < 4)
        assert ("): established." in words) == (count == 4)
        assert f"over {count} lineages" in words
    assert horizons.halfway(replace(runs, steps=30)).steps == 10  # evaluations are every ten


def test_another_tokenizer_is_judged_by_lineages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar: an interval that is not all below zero, and less than three points lost. Below four lineages nobody judges."""
    asked: list[tuple[str, int]] = []

    def accuracy_of(_: Any, one: Any, lineage: int) -> float:
        asked.append((one.title, lineage))
        return 99.0

    monkeypatch.setattr(tokenizers, "teacher_accuracy", accuracy_of)
    words = {}
    for count, accuracy in ((4, 0.5), (4, 0.4), (2, 0.5)):
        runs = Runs(tmp_path / f"{count}-{accuracy}", lineages=range(count), seeds=(0, 1), problems=PROBLEMS)
        write_run(runs, OPD, 0.5)
        write_run(runs, tokenizers.FOREIGN, accuracy)
        words[count, accuracy] = ITEMS["tokenizers"].section(runs, {}).words[-1]
    assert "at step 40: +0.0" in words[4, 0.5]
    assert "bar (interval not below zero, mean loss below 3 points) met; the interval excludes" in words[4, 0.5]
    assert "-10.0" in words[4, 0.4]
    assert "missed; the interval does not exclude" in words[4, 0.4]
    assert "too few to tell" in words[2, 0.5]
    assert asked[:4] == [("OPD", lineage) for lineage in range(4)]


def test_figures_show_the_tables_numbers(runs: Runs, tmp_path: Path) -> None:
    for variant, accuracy in ((OPD, 0.5), (PREFIX, 0.4), (SUFFIX, 0.1)):
        write_run(runs, variant, accuracy)
    section = ITEMS["p1"].section(runs, {})
    chart = learning_chart(section)
    assert chart is not None
    assert [series.label for series in chart.series] == ["OPD", "Prefix-30", "Suffix-30"]
    for series, variant in zip(chart.series, (OPD, PREFIX, SUFFIX), strict=True):
        assert series.y[-1] == runs.accuracy(variant, runs.steps).mean
    assert [path.name for path in write_figures([section, ITEMS["p2"].section(runs, probes(0.6))], tmp_path)] == ["p1.svg"]
    assert (tmp_path / "p1.svg").read_text().startswith("<?xml")


def test_the_words_follow_the_numbers(runs: Runs) -> None:
    for variant, accuracy in ((OPD, 0.5), (PREFIX, 0.5), (SUFFIX, 0.1)):
        write_run(runs, variant, accuracy)
    words = " ".join(ITEMS["p1"].section(runs, {}).words)
    assert "Prefix-30 minus OPD at the last step: +0.0" in words
    assert "not distinguishable from zero" in words
    assert "Suffix-30 minus OPD at the last step: -40.0" in words
    assert "established, lower" in words
    words = " ".join(ITEMS["p2"].section(runs, probes(0.6)).words)
    assert "60 (50 to 70)" in words
    assert "+60.0 points over 1 lineage: too few to tell" in words
    assert "Not run: probes of lineages 1, 2, 3." in words


def test_a_second_call_only_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With all runs there, nothing is trained: neither models nor students."""
    runs = Runs(tmp_path, lineages=range(1), seeds=range(2), problems=PROBLEMS)
    for variant in ITEMS["p5"].variants:
        write_run(runs, variant, 0.5)
    monkeypatch.setattr("iwopd.tiny.open_world", lambda *a, **k: None)
    monkeypatch.setattr("iwopd.train.many._start", lambda run: pytest.fail(f"started {run.title}"))
    options = ["p5", "--seeds", "2", "--lineages", "1", "--problems", str(PROBLEMS), "--out", str(tmp_path), "--json"]
    options += ["--results", str(tmp_path / "results")]
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *options, "--markdown", str(tmp_path / "tables.md")])
    assert ended.value.code == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(printed["p5"]["numbers"]["kl"]["OPD"]) == 40
    assert "### P5" in (tmp_path / "tables.md").read_text()


def test_only_some_rows_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr("iwopd.tiny.open_world", lambda *a, **k: None)
    monkeypatch.setattr("iwopd.tiny.World.weights", {"student": "a", "teacher": "b"})
    monkeypatch.setattr(
        "iwopd.analysis.reproduce.command.run_all", lambda planned, **_: started.extend(one.title for one in planned)
    )
    options = ["--world", "drift", "--first-lineage", "12", "--only", "OPD, lr x 2", "Prefix-30, lr x 4"]
    with pytest.raises(SystemExit):
        main(["reproduce", "rates", *options, "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")])
    assert sorted(started) == sorted(
        f"{title}, lineage {lineage}, seed 0" for title in options[5:] for lineage in range(12, 16)
    )
    assert "Not run: " in capsys.readouterr().out


def test_several_updates_a_batch_make_other_runs() -> None:
    for variant in rivals.UPDATES:
        config = Runs(Path("x"), lineages=(0,), seeds=(0,), problems=PROBLEMS).config(variant, 0, 0)
        assert config.optim.mini_batches * config.optim.ppo_epochs == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["p11"], "unknown item 'p11'"),
        (["p1", "--seeds", "0"], "--seeds must be at least 1"),
        (["p1", "--steps", "25"], "multiple of ten"),
        (["p1", "--world", "mars"], "unknown world 'mars'"),
        (["p1", "--only", "Prefix30"], "--only: there is no 'Prefix30' here; there are OPD; Prefix-30; Suffix-30"),
    ],
)
def test_bad_options(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *words, "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")])
    assert ended.value.code == UserError.exit_code
    assert said in capsys.readouterr().err

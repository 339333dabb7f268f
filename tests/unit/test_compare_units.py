"""`iwopd compare --unit`: seeds of one lineage are averaged, lineages decide; runs that share too much are named."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from iwopd.analysis.compare import Comparison, Difference, compare
from iwopd.analysis.tables import as_json, latex, markdown, print_comparison
from iwopd.analysis.units import Units
from iwopd.analysis.wording import sentence, verdict
from iwopd.cli import main
from iwopd.config import config_toml, make_config
from iwopd.eval.statistics import over_units
from iwopd.methods import METHODS
from iwopd.runs.evaluations import ResultsError
from iwopd.runs.results import ModelResults, load

PROBLEMS = 50
GAINS = (4, 7, 5, 9, 6)
"""Problems that IW-OPD has more, by lineage."""
FOUR = (0.125, 0.05443384, 0.19556616, 0.01104369, 4)
"""Of the first four, in shares: 6.25 -+ 3.18245 * sqrt(4.9167 / 4) of 50 problems, p and units."""


def write_run(folder: Path, right: int, method: str = "opd", seed: int = 0, lineage: int = 0, **change: Any) -> Path:
    """Evaluated at step 40, on problems of which the first are right."""
    folder.mkdir(parents=True)
    tree = {"seed": seed, "models": {"world": "clean", "lineage": lineage}, "method": METHODS[method], **change}
    (folder / "config.toml").write_text(config_toml(make_config(tree)))
    (folder / "run.json").write_text(json.dumps({"format": 1, "iwopd": "0.1.0", "data": "x"}))
    scores = [[int(place < right)] for place in range(PROBLEMS)]
    record = {"step": 40, "task": "t", "problem_ids": [str(place) for place in range(PROBLEMS)], "scores": scores}
    (folder / "evals.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def sweep(root: Path, lineages: int, seeds: int = 2) -> list[Path]:
    """Both methods, lineage by lineage, seed by seed; each seed adds one problem to both."""
    found = []
    for method in ("opd", "iw-opd"):
        for lineage in range(lineages):
            for seed in range(seeds):
                right = 10 + 3 * lineage + seed + (GAINS[lineage] if method == "iw-opd" else 0)
                found.append(write_run(root / f"{method}-{lineage}-{seed}", right, method, seed, lineage))
    return found


def over(difference: Difference) -> tuple[float, ...]:
    """Mean, low, high, p and units."""
    assert difference.over_units is not None
    return (*difference.over_units.interval, difference.over_units.p_value, difference.over_units.units)


def compared(folders: list[Path], *units: str, name: str | None = None) -> Comparison:
    results: list[tuple[str | None, ModelResults]] = [(name, load(folder)) for folder in folders]
    return compare(results, units=Units.parse(units))


def test_lineages_are_the_units(tmp_path: Path) -> None:
    found = compared(sweep(tmp_path, 5), "models.lineage")
    (difference,) = found.differences
    by_hand = over_units([gain / PROBLEMS for gain in GAINS])
    assert over(difference) == pytest.approx((*by_hand.interval, by_hand.p_value, 5))
    assert (*difference.interval, difference.p_value) == over(difference)[:-1]
    assert difference.holm == difference.p_value
    assert [(group.name, len(group.members)) for group in found.groups] == [("OPD", 10), ("IW-OPD", 10)]
    assert verdict(difference, found) == "distinguishable from noise"
    assert "over 5 units (models.lineage, 10 pairs of runs)" in sentence(difference, found)
    assert not found.notes
    mean, low, high = found.scores[0, "t"].interval
    base = over_units([(10.5 + 3 * lineage) / PROBLEMS for lineage in range(5)]).interval
    assert (mean, low, high) == pytest.approx(tuple(base))


def test_three_units_are_too_few(tmp_path: Path) -> None:
    found = compared(sweep(tmp_path, 3), "models.lineage")
    (difference,) = found.differences
    assert verdict(difference, found) == "too few to tell (3 units, a verdict takes 4)"
    assert sentence(difference, found) == "IW-OPD − OPD on t: +10.7 points: too few to tell (3 units, a verdict takes 4)."
    content = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert (content["differences"][0]["low"], content["differences"][0]["over_units"]["units"]) == (None, 3)
    assert content["groups"][0]["runs"][0]["unit"] == "0"
    page = StringIO()
    print_comparison(found, Console(file=page, width=200))
    for text in (page.getvalue(), markdown(found), latex(found)):
        assert "nan" not in text.lower()


def test_units_by_name(tmp_path: Path) -> None:
    """Results that do not say what they share."""
    folders = []
    for method in ("OPD", "IW-OPD"):
        for place in range(4):
            folder = tmp_path / f"{method}{place}"
            folder.mkdir()
            right = 10 + 3 * place + (GAINS[place] if method == "IW-OPD" else 0)
            task = {"problem_ids": [str(n) for n in range(PROBLEMS)], "scores": [[int(n < right)] for n in range(PROBLEMS)]}
            content = {"format": 1, "model": "m", "method": method, "settings": {}, "tasks": {"t": task}}
            (folder / "eval.json").write_text(json.dumps(content))
            folders.append(folder)
    names = [f"{folder}={'abcd'[place % 4]}" for place, folder in enumerate(folders)]
    assert over(compared(folders, *names).differences[0]) == pytest.approx(FOUR)
    with pytest.raises(ResultsError, match=r"IW-OPD3 has no unit: name its unit with --unit .*IW-OPD3=UNIT"):
        compared(folders, *names[:-1])
    with pytest.raises(ResultsError, match="--unit names nowhere, which is not among the results"):
        compared(folders, *names, "nowhere=a")
    with pytest.raises(ResultsError, match=r"has no setting models\.lineage: name its unit"):
        compared(folders, "models.lineage")
    with pytest.raises(ResultsError, match=r"takes one setting, got models\.lineage and seed"):
        Units.parse(["models.lineage", "seed"])
    with pytest.raises(ResultsError, match="is not PATH=UNIT"):
        Units.parse(["x="])


def test_only_units_and_seeds_that_both_have(tmp_path: Path) -> None:
    folders = [folder for folder in sweep(tmp_path, 5) if folder.name not in ("iw-opd-4-0", "iw-opd-4-1", "opd-0-1")]
    found = compared(folders, "models.lineage")
    (difference,) = found.differences
    assert over(difference) == pytest.approx(FOUR)
    assert difference.seeds == 7
    assert any("on the units that both have; left out: 4" in note for note in found.notes)
    assert any("on the seeds that both have, 0" in note for note in found.notes)


def test_units_do_not_hide_other_settings(tmp_path: Path) -> None:
    folders = sweep(tmp_path, 4, seeds=1)
    folders.append(write_run(tmp_path / "other", 20, "opd", 0, 4, optim={"lr": 1e-3}))
    with pytest.raises(ResultsError, match=r"are both OPD, but differ in optim\.lr"):
        compared(folders, "models.lineage")
    twin = write_run(tmp_path / "twin", 20, "opd", 0, 3)
    with pytest.raises(ResultsError, match="are both OPD with seed 0"):
        compared([*folders[:-1], twin], "models.lineage")


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, sweep(tmp_path, 4)), "--unit", "models.lineage", "--format", "json"])
    assert ended.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["differences"][0]["over_units"]["units"] == 4


# --- warnings --------------------------------------------------------------------------------------------------------


def test_lineages_without_units_are_said_aloud(tmp_path: Path) -> None:
    found = compared(sweep(tmp_path, 2))
    assert any(
        "OPD has runs with 2 students, each compared by itself; to compare over them, --unit models.lineage" in one
        for one in found.notes
    )


def test_seeds_of_one_teacher_are_not_independent(tmp_path: Path) -> None:
    folders = []
    for method in ("opd", "iw-opd"):
        for seed in range(6):
            models = {"student": "org/s", "teacher": f"org/t{seed % 2}"}
            folders.append(
                write_run(tmp_path / f"{method}{seed}", 10 + seed, method, seed, models=models, data={"prompts": "p.jsonl"})
            )
    named = [("OPD" if "iw" not in folder.name else "IW", load(folder)) for folder in folders]
    said = "OPD: 6 runs of 2 values of models.teacher: runs that share models are not independent; use --unit models.teacher"
    assert said in compare(named).notes
    assert said not in compare(named, units=Units.parse(["models.teacher"])).notes


def test_copies_of_a_run_are_named(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"opd{seed}", 20, "opd", seed) for seed in range(2)]
    folders += [write_run(tmp_path / f"iw{seed}", 25 + seed, "iw-opd", seed) for seed in range(2)]
    notes = compared(folders).notes
    (copies,) = (note for note in notes if "the same score on every sample" in note)
    assert "opd0 and" in copies
    assert "opd1 of OPD" in copies


def test_evaluation_on_training_prompts_is_named(tmp_path: Path) -> None:
    models = {"student": "org/s", "teacher": "org/t"}
    inputs = {"data": {"prompts": "p.jsonl"}, "eval": {"tasks": ["t"], "data": {"t": "p.jsonl"}}}
    folders = [write_run(tmp_path / method, 10, method, models=models, **inputs) for method in ("opd", "iw-opd")]
    assert any("t is evaluated on the training prompts (p.jsonl)" in note for note in compared(folders).notes)


def test_interval_and_p_that_disagree_are_explained(tmp_path: Path) -> None:
    """Found by search over pairs of small evaluations: the bootstrap leaves zero out, the sign flips do not."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        first = (torch.rand(20, 4, generator=generator) < 0.5).int()
        second = (torch.rand(20, 4, generator=generator) < 0.62).int()
        folders = []
        for method, scores in (("A", first), ("B", second)):
            folder = tmp_path / f"{trial}{method}"
            folder.mkdir()
            task = {"problem_ids": [str(n) for n in range(20)], "scores": scores.tolist()}
            content = {"format": 1, "model": "m", "method": method, "settings": {}, "tasks": {"t": task}}
            (folder / "eval.json").write_text(json.dumps(content))
            folders.append(folder)
        found = compared(folders)
        (d,) = found.differences
        apart = (d.interval.low > 0 or d.interval.high < 0) != (d.p_value < 0.05)
        assert ("two methods; where they disagree, p decides" in sentence(d, found)) == apart
        if apart:
            return
    pytest.fail("no pair disagreed")

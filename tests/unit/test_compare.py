"""Results are read with care, pairs are formed by problem and seed, and the words say what the numbers say."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from iwopd.analysis.compare import AVERAGE, Comparison, compare
from iwopd.analysis.tables import as_json, columns, escape_latex, escape_markdown, latex, markdown, print_comparison
from iwopd.analysis.wording import sentence, verdict
from iwopd.commands.compare import named_results
from iwopd.config import config_toml, make_config
from iwopd.methods import METHODS, TITLES, method_title
from iwopd.runs.evaluations import ResultsError
from iwopd.runs.logs import RunError
from iwopd.runs.results import ModelResults, load


def draw(problems: int, samples: int, chance: float, seed: int = 0) -> list[list[int]]:
    noise = torch.rand(problems, samples, generator=torch.Generator().manual_seed(seed))
    return (noise < chance + 0.3 * torch.linspace(-1, 1, problems)[:, None]).int().tolist()


def task(scores: list[list[int]], name: str = "aime24", **more: Any) -> dict[str, Any]:
    return {"problem_ids": [f"{name}/{row}" for row in range(len(scores))], "scores": scores, "seconds": 1.5, **more}


def write_eval(folder: Path, tasks: dict[str, Any], **change: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"samples": 4, "temperature": 1.0, "seed": 0}
    content = {"format": 1, "iwopd": "0.1.0", "model": "Qwen/Qwen3-1.7B", "settings": settings, "tasks": tasks, **change}
    (folder / "eval.json").write_text(json.dumps(content))
    return folder


def write_run(folder: Path, evaluations: dict[int, dict[str, Any]], method: str = "opd", seed: int = 0, **change: Any) -> Path:
    folder.mkdir(parents=True)
    tree = {"seed": seed, "models": {"world": "clean"}, "method": METHODS[method], **change}
    (folder / "config.toml").write_text(config_toml(make_config(tree)))
    (folder / "run.json").write_text(json.dumps({"format": 1, "iwopd": "0.1.0", "data": "x"}))
    records = [{"step": step, "task": name, **data} for step, tasks in evaluations.items() for name, data in tasks.items()]
    (folder / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def names(*pairs: tuple[str | None, Path]) -> list[tuple[str | None, ModelResults]]:
    return [(name, load(path)) for name, path in pairs]


def two(tmp_path: Path, first: list[list[int]], second: list[list[int]], **options: Any) -> Comparison:
    a = write_eval(tmp_path / "a", {"aime24": task(first)}, method="OPD")
    b = write_eval(tmp_path / "b", {"aime24": task(second)}, method="IW-OPD")
    return compare(names((None, a), (None, b)), **options)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_both_kinds_of_directory_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {0: {"t": task([[0, 0]])}, 10: {"t": task([[1, 0]])}}, method="iw-opd", seed=3)
    found = load(run)
    assert (found.kind, found.method, found.student, found.seed, found.step) == ("run", "IW-OPD", "clean world", 3, 10)
    assert found.tasks["t"].result.scores.tolist() == [[1, 0]]
    assert load(run, 0).method == "Base"
    scored = task([[1, 0]], answers=[["7", None]])
    evaluated = load(write_eval(tmp_path / "eval", {"t": scored}, train_seed=2))
    assert (evaluated.kind, evaluated.method, evaluated.student, evaluated.seed) == ("eval", "eval", "Qwen3-1.7B", 2)
    assert evaluated.tasks["t"].answers == (("7", None),)


def test_methods_have_the_papers_titles() -> None:
    for name, section in METHODS.items():
        resolved = make_config({"models": {"world": "clean"}, "method": section}).model_dump()["method"]
        assert method_title(resolved) == TITLES[name]
    assert method_title({"weights": "cumulative-share", "params": {"gamma": 2.0}}) == "opd cumulative-share gamma=2.0"


def test_a_line_that_a_crash_cut_off_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {10: {"t": task([[1]])}})
    with (run / "evals.jsonl").open("a") as file:
        file.write('{"step": 20, "ta')
    assert load(run).step == 10
    with (run / "evals.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"evals.jsonl, line 2 is damaged"):
        load(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, this version of iwopd reads format 1"),
        ({"tasks": {}}, "tasks is empty"),
        ({"tasks": []}, r"tasks must be an object, got \[\]"),
        ({"model": 3}, "model must be a string, got 3"),
        ({"tasks": {"t": {"problem_ids": ["a"]}}}, "tasks.t: the field 'scores' is missing"),
        ({"tasks": {"t": {"problem_ids": ["a"], "scores": [[1], [0]]}}}, "scores has 2 rows of 1 samples, problem_ids has 1"),
        ({"tasks": {"t": {"problem_ids": ["a", "b"], "scores": [[1], [0, 1]]}}}, "2 rows of equally many numbers"),
        ({"tasks": {"t": {"problem_ids": ["a"], "scores": [[2]]}}}, r"is 2.0 in row 0 .*must lie in \[0, 1\]"),
        ({"tasks": {"t": {"problem_ids": ["a"], "scores": [[float("nan")]]}}}, "is nan in row 0"),
        ({"tasks": {"t": {"problem_ids": ["a"], "scores": [[10**400]]}}}, "tasks.t: "),
        ({"tasks": {"t": {"problem_ids": ["a", "a"], "scores": [[1], [1]]}}}, "are not unique"),
        ({"tasks": {"t": {"problem_ids": [1], "scores": [[1]]}}}, "problem_ids must be a list of strings"),
        ({"tasks": {"t": task([[1, 0]], answers=[["7"]])}}, "answers must be 1 rows of 2 strings or nulls"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_eval(tmp_path / "e", change.pop("tasks", {"t": task([[1]])}), **change)
    with pytest.raises(ResultsError, match=message) as caught:
        load(folder)
    assert "eval.json" in str(caught.value)


def test_wrong_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="nowhere does not exist: give a run directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match=r"holds neither eval.json .* nor run.json"):
        load(tmp_path)
    run = write_run(tmp_path / "run", {0: {"t": task([[1]])}, 10: {"t": task([[1]])}})
    with pytest.raises(ResultsError, match="was not evaluated at step 7; steps with evaluations: 0, 10"):
        load(run, 7)
    with pytest.raises(ResultsError, match="a step can be chosen for training runs only"):
        load(write_eval(tmp_path / "e", {"t": task([[1]])}), 7)
    (run / "evals.jsonl").write_text("")
    with pytest.raises(ResultsError, match="was never evaluated"):
        load(run)


def test_names_and_steps_on_the_command_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {step: {"t": task([[1]])} for step in (0, 10, 40)})
    assert named_results(str(run))[0] is None
    name, result = named_results(f"{run}@10")
    assert (name, result.step) == ("OPD@10", 10)
    assert named_results(f"{run}@0")[0] == "Base"
    name, result = named_results(f"mine={run}@10")
    assert (name, result.step) == ("mine", 10)
    strange = write_eval(tmp_path / "a=b@3", {"t": task([[1]])})
    assert named_results(str(strange))[1].path == strange
    with pytest.raises(ResultsError, match="is not NAME=PATH"):
        named_results("name=")


# --- pairing ---------------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_problem_not_by_place(tmp_path: Path) -> None:
    scores = draw(30, 4, 0.5)
    shuffled = task(scores[::-1])
    shuffled["problem_ids"] = shuffled["problem_ids"][::-1]
    a = write_eval(tmp_path / "a", {"aime24": task(scores)})
    b = write_eval(tmp_path / "b", {"aime24": shuffled})
    (difference,) = compare(names((None, a), (None, b))).differences
    assert (difference.differing, difference.p_value) == (0, 1.0)


def test_numbers_of_a_plain_comparison(tmp_path: Path) -> None:
    first, second = draw(30, 8, 0.4, seed=1), draw(30, 8, 0.6, seed=2)
    found = two(tmp_path, first, second)
    (difference,) = found.differences
    by_hand = torch.tensor(second).double().mean(1) - torch.tensor(first).double().mean(1)
    assert difference.interval.mean == pytest.approx(float(by_hand.mean()))
    half = 2.045 * float(by_hand.std()) / 30**0.5
    assert difference.interval.high - difference.interval.low == pytest.approx(2 * half, rel=0.1)
    assert verdict(difference, found) == "distinguishable from noise"
    assert AVERAGE not in columns(found)  # one task needs no average
    assert any("One training seed a side" in note for note in found.notes)


def test_only_common_problems_are_compared_and_said_aloud(tmp_path: Path) -> None:
    a = write_eval(tmp_path / "a", {"aime24": task(draw(30, 4, 0.5))})
    b = write_eval(tmp_path / "b", {"aime24": task(draw(20, 8, 0.5))}, settings={"samples": 8, "temperature": 0.6, "seed": 0})
    found = compare(names((None, a), (None, b)))
    assert found.differences[0].problems == 20
    text = "\n".join(found.notes)
    assert "ONLY the 20 that all have are compared, of up to 30" in text
    assert "samples per problem differ (4, 8)" in text
    assert "evaluated with different samples (4 and 8), temperature (1.0 and 0.6)" in text
    other = task(draw(5, 4, 0.5), name="other")
    with pytest.raises(ResultsError, match="aime24: the results have no problem in common"):
        compare(names((None, a), (None, write_eval(tmp_path / "c", {"aime24": other}))))


def test_equal_methods_are_seeds_of_one_group(tmp_path: Path) -> None:
    runs = []
    for method, chance in (("opd", 0.4), ("iw-opd", 0.5)):
        for seed in range(3):
            scores = draw(40, 2, chance + 0.01 * seed, seed)
            runs.append((None, write_run(tmp_path / f"{method}{seed}", {40: {"t": task(scores)}}, method, seed)))
    runs[3], runs[5] = runs[5], runs[3]  # pairs are by seed, not by order
    found = compare(names(*runs))
    (difference,) = found.differences
    assert [len(group.members) for group in found.groups] == [3, 3]
    assert (difference.seeds, difference.group, difference.baseline) == (3, "IW-OPD", "OPD")
    assert difference.p_seeds == difference.p_value
    assert difference.cancelled is not None
    assert difference.cancelled > 0.5  # the noise was matched by seed
    assert "over 3 training seeds and 40 problems" in sentence(difference, found)
    assert not found.notes
    fewer = compare(names(*runs[:5]))
    assert any("compared on the seeds that both have, 1, 2" in note for note in fewer.notes)
    assert fewer.differences[0].seeds == 2


def test_runs_that_only_look_alike_are_not_mixed(tmp_path: Path) -> None:
    data = {40: {"t": task(draw(10, 2, 0.5))}}
    a = write_run(tmp_path / "a", data)
    b = write_run(tmp_path / "b", data, seed=1, optim={"lr": 1e-3})
    twin = write_run(tmp_path / "twin", data)
    other = write_run(tmp_path / "other", data, "iw-opd")
    with pytest.raises(ResultsError, match=r"are both OPD, but differ in optim.lr; name them"):
        compare(names((None, a), (None, b), (None, other)))
    with pytest.raises(ResultsError, match="are both OPD with seed 0"):
        compare(names((None, a), (None, twin), (None, other)))
    mixed = write_run(tmp_path / "mixed", data, rollout={"mix": {"share": 0.5}})
    with pytest.raises(ResultsError, match=r"both OPD with seed 0, and differ in rollout.mix.share; if"):
        compare(names((None, a), (None, mixed)))
    with pytest.raises(ResultsError, match=r"all results belong to one group \(OPD\)"):
        compare(names((None, a)))
    named = compare(names(("x", a), ("x", b), (None, other)))
    assert any("The runs of x differ in more than the seed: optim.lr" in note for note in named.notes)
    assert compare(names(("low", a), ("high", b))).differences[0].group == "high"


def test_a_model_without_a_seed_meets_every_seed(tmp_path: Path) -> None:
    runs = [(None, write_run(tmp_path / f"r{s}", {9: {"t": task(draw(20, 2, 0.6, s))}}, seed=s)) for s in range(2)]
    base = write_eval(tmp_path / "base", {"t": task(draw(20, 2, 0.3))}, student="clean world", method="Base")
    found = compare(names((None, base), *runs))
    assert found.differences[0].seeds == 2
    assert any("Base is one model without a training seed" in note for note in found.notes)


def test_each_student_has_its_baseline(tmp_path: Path) -> None:
    given = []
    for student in ("S", "L"):
        for method in ("Base", "OPD", "IW-OPD"):
            data = {"t": task(draw(10, 2, 0.5))}
            given.append((None, write_eval(tmp_path / student / method, data, student=student, method=method)))
    found = compare(names(*given), baseline="OPD")
    assert [(d.student, d.group, d.baseline) for d in found.differences] == [
        ("S", "Base", "OPD"), ("S", "IW-OPD", "OPD"), ("L", "Base", "OPD"), ("L", "IW-OPD", "OPD")
    ]  # fmt: skip
    with pytest.raises(ResultsError, match="no group is called 'X'; there are: Base, OPD, IW-OPD"):
        compare(names(*given), baseline="X")
    across = compare(names(given[0], given[3]))
    assert across.differences[0].student == "L"


def test_average_weighs_tasks_equally_and_only_those_that_all_have(tmp_path: Path) -> None:
    both = {"aime24": task([[1], [1]]), "mbpp+": task([[0]] * 10, name="m")}
    a = write_eval(tmp_path / "a", {**both, "x": task([[1]], name="x")})
    b = write_eval(tmp_path / "b", both)
    found = compare(names((None, a), (None, b)))
    assert found.scores[0, AVERAGE].interval.mean == pytest.approx(0.5)
    assert any("Avg is over the tasks that all have: aime24, mbpp+" in note for note in found.notes)
    assert [d.task for d in found.differences] == ["aime24", "mbpp+", AVERAGE]
    assert compare(names((None, a), (None, b)), tasks=["mbpp+"]).tasks == ("mbpp+",)
    with pytest.raises(ResultsError, match="no result has the task 'nope'; there are: aime24, mbpp"):
        compare(names((None, a), (None, b)), tasks=["nope"])


def test_metrics(tmp_path: Path) -> None:
    votes = task([[1, 0, 0], [1, 1, 0]], answers=[["7", "8", "8"], ["7", "7", None]])
    a = write_eval(tmp_path / "a", {"t": votes})
    b = write_eval(tmp_path / "b", {"t": task([[0, 0, 0], [0, 0, 1]])})
    assert compare(names((None, a), (None, b)), metric="best@3").scores[0, "t"].interval.mean == 1.0
    assert compare(names((None, a), (None, b)), metric="pass@1").scores[0, "t"].interval.mean == pytest.approx(0.5)
    assert compare(names((None, a), ("other", a)), metric="majority@3").scores[0, "t"].interval.mean == 0.5
    with pytest.raises(ResultsError, match=r"majority@3 needs answers to vote on, and t of .*b has none"):
        compare(names((None, a), (None, b)), metric="majority@3")
    with pytest.raises(ResultsError, match=r"best@8 on t of .*a: k = 8 is not possible with 3 samples"):
        compare(names((None, a), (None, b)), metric="best@8")
    for wrong in ("median", "best", "best@0", "best@x", "mean@"):
        with pytest.raises(ResultsError, match="unknown metric"):
            compare(names((None, a), (None, b)), metric=wrong)


# --- words and tables ------------------------------------------------------------------------------------------------


def test_the_verdict_in_words(tmp_path: Path) -> None:
    found = two(tmp_path, draw(30, 8, 0.50, 5), draw(30, 8, 0.52, 6))
    text = sentence(found.differences[0], found)
    assert re.match(
        r"IW-OPD − OPD on aime24: [+−]\d\.\d points \(95 % interval −\d+\.\d to \+\d+\.\d; p = 0\.\d+\): not distinguishable "
        r"from noise\. To tell a difference of this size with 80 % power: ",
        text,
    )
    assert re.search(r"about [\d,]+ problems \(now 30\)", text)
    assert "To tell 1 point with 80 % power" in text


def test_a_small_task_says_that_it_cannot_tell(tmp_path: Path) -> None:
    found = two(tmp_path, [[0]] * 3 + [[1]] * 20, [[1]] * 23)
    assert "Only 3 problems differ: no p below 0.25 is possible." in sentence(found.differences[0], found)
    same = two(tmp_path / "same", [[1]] * 5, [[1]] * 5)
    assert verdict(same.differences[0], same) == "the same on every problem"


def test_several_comparisons_are_corrected(tmp_path: Path) -> None:
    plain = [[0]] * 7 + [[1]] * 20
    given = [(None, write_eval(tmp_path / "a", {"t": task(plain)}, method="A"))]
    given += [(None, write_eval(tmp_path / m, {"t": task([[1]] * 27)}, method=m)) for m in "BCDEFG"]
    found = compare(names(*given))
    first = found.differences[0]
    assert first.p_value == pytest.approx(2 / 2**7)
    assert first.holm == pytest.approx(6 * 2 / 2**7)
    assert verdict(first, found) == "distinguishable on its own, but not as one of 6 comparisons"


EVIL = "a_b&%$#{}~^\\|<b>`\x1b[31m\n[bold]\u202e"


@pytest.fixture
def paper(tmp_path: Path) -> Comparison:
    given = []
    for student in ("Qwen3-1.7B", EVIL):
        for number, method in enumerate(("OPD", "IW-OPD", EVIL)):
            data = {
                name: task(draw(12, 2, 0.4 + 0.1 * number), name)
                for name in ("mbpp+", "hmmt25", "aime25", "humaneval+", "aime24")
            }
            folder = tmp_path / str(len(given))
            given.append((None, write_eval(folder, data, student=student, method=method)))
    return compare(names(*given))


def test_latex_has_the_papers_layout(paper: Comparison) -> None:
    text = latex(paper)
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    assert r"\begin{tabular}{ll|ccc|cc|c}" in text
    assert "AIME24 & AIME25 & HMMT25 & HE+ & MBPP+ &" in body
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 2 + 6
    for line in rows[1:]:
        assert len(re.findall(r"(?<!\\)&", line)) == 7
    assert body.count(r"\textbf{") >= 2 * 6
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert "\x1b" not in text
    assert latex(paper).count(r"\midrule") == 2


def test_latex_without_areas_has_one_row_of_heads(tmp_path: Path) -> None:
    data = {"tiny": task(draw(12, 2, 0.5), "tiny")}
    text = latex(compare(names(*((None, write_eval(tmp_path / method, data, method=method)) for method in ("A", "B")))))
    head = text[text.index(r"\toprule") : text.index(r"\midrule")].splitlines()[1:]
    assert head == [r"\textbf{Student} & \textbf{Method} & tiny \\"]
    assert "multicolumn" not in text


def test_hostile_names_are_harmless_everywhere(paper: Comparison) -> None:
    assert escape_latex("50%_a\\b") == r"50\%\_a\textbackslash{}b"
    assert escape_markdown("a|b*<i>") == r"a\|b\*&lt;i&gt;"
    page = StringIO()
    print_comparison(paper, Console(file=page, width=400))
    shown = markdown(paper)
    for text in (page.getvalue(), shown, latex(paper)):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "[bold]" in page.getvalue()
    heads = [line for line in shown.splitlines() if line.startswith("| student")]
    rows = [line for line in shown.splitlines() if line.startswith("| Qwen3")]
    for line in rows:
        assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", heads[0]))


def test_json_holds_everything(paper: Comparison) -> None:
    content = json.loads(json.dumps(as_json(paper), allow_nan=False))
    assert [group["baseline"] for group in content["groups"]] == [True, False, False] * 2
    assert len(content["differences"]) == 2 * 2 * 6
    first = content["differences"][0]
    assert first["low"] <= first["mean"] <= first["high"]
    assert first["p"] <= first["p_holm"] <= 1
    assert {need["difference"] for need in first["needed_for_80_percent_power"]} >= {1.0}
    assert content["groups"][1]["scores"]["aime24"]["mean"] == pytest.approx(100 * paper.scores[1, "aime24"].interval.mean)

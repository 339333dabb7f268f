"""`iwopd eval` in real processes: the real benchmark files, resuming after a kill, and clear words for bad input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from iwopd.cli import main
from iwopd.eval import evalplus
from iwopd.eval.sandbox import probe
from iwopd.runs.directory import RunDirectory
from models import save_byte_model, save_pair
from shared_data import FOLDER, shared
from waiting import PATIENCE, wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
PROBLEMS = [{"id": f"p{i}", "problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in PROBLEMS))
    return path


def words(*more: str | Path) -> list[str]:
    return [sys.executable, "-m", "iwopd", "eval", *(str(word) for word in more)]


def run(*more: str | Path, code: int = 0, **environment: str) -> str:
    done = subprocess.run(words(*more), env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The words with which the command line refuses, in this process: a fresh one takes seconds to start."""

    def attempt(*more: str | Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["eval", *(str(word) for word in more)])
        assert ended.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("IWOPD_DATA", raising=False)
    return attempt


def results(folder: Path) -> dict[str, Any]:
    tasks: dict[str, Any] = json.loads((folder / "eval.json").read_text())["tasks"]
    return tasks


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples-{task}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_real_files_end_to_end(model: Path, tmp_path: Path) -> None:
    for name in ("aime24.jsonl", "aime25.jsonl", "gsm8k_test.jsonl", "HumanEvalPlus.jsonl", "MbppPlus.jsonl"):
        shared(name)
    out = tmp_path / "out"
    tasks = "aime24,aime25,gsm8k,humaneval+,mbpp+"
    text = run(
        *("--model", model, "--tasks", tasks, "--limit", "6", "--samples", "2", "--max-tokens", "40", "--out", out, "--json"),
        IWOPD_DATA=str(FOLDER),
    )
    found = results(out)
    assert list(found) == tasks.split(",")
    for name, result in found.items():
        greedy = name.endswith("+")
        assert [len(row) for row in result["scores"]] == [1 if greedy else 2] * 6
        assert sum(result["outcomes"].values()) == 6 * (1 if greedy else 2)
        assert all(score == 0.0 for row in result["scores"] for score in row)  # a random model solves nothing
        assert result["aggregate"] == ("pass@1" if greedy else "mean@2")
    assert set(found["aime24"]["outcomes"]) <= {"wrong", "unparsed", "timeout"}
    assert set(found["mbpp+"]["outcomes"]) <= {"fail", "error", "timeout"}
    summary = json.loads(text.splitlines()[-1]) if text.splitlines()[-1].startswith("{") else None
    assert summary is None or summary["tasks"]["aime24"]["problems"] == 6


@pytest.mark.parametrize("sandboxed", [True, False])
def test_the_sandbox_is_recorded_and_printed(
    model: Path, tmp_path: Path, sandboxed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not sandboxed:
        monkeypatch.setattr(probe, "_found", {"bubblewrap": "not here", "landlock": "not here"})
    elif None not in probe.findings().values():
        pytest.skip("no sandbox works here")
    problem: dict[str, Any] = {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
    }
    problem |= {"base_input": [[1]], "plus_input": [[2]], "atol": 0}
    (tmp_path / "code.jsonl").write_text(json.dumps(problem) + "\n")
    options = [
        "--model",
        model,
        "--tasks",
        "humaneval+",
        "--data",
        f"humaneval+={tmp_path}/code.jsonl",
        "--max-tokens",
        "4",
    ]
    monkeypatch.setattr(evalplus, "_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out"
    if not sandboxed:  # refused before a model is loaded
        with pytest.raises(SystemExit):
            main(["eval", *map(str, options), "--out", str(out)])
        assert "no sandbox works here" in capsys.readouterr().err
        assert not out.exists()
        options.append("--unsafe-no-sandbox")
    with contextlib.suppress(SystemExit):
        main(["eval", *map(str, options), "--out", str(out)])
    used = results(out)["humaneval+"]["sandbox"]
    assert used == (probe.choose().name if sandboxed else "none: programs ran unprotected (--unsafe-no-sandbox)")
    assert samples(out, "humaneval+")[0]["sandbox"] == used
    assert f"humaneval+: sandbox {used}" in capsys.readouterr().out


def test_a_killed_evaluation_goes_on_and_ends_the_same(model: Path, problems: Path, tmp_path: Path) -> None:
    options = ["--model", model, "--tasks", "aime24", "--data", f"aime24={problems}", "--samples", "48", "--max-tokens", "96"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*options, "--out", whole)
    process = subprocess.Popen(words(*options, "--out", broken), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    log = broken / "samples-aime24.jsonl"
    wait_until(lambda: log.exists() and log.stat().st_size, "a sample")
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = log.read_text()
    assert 0 < before.count("\n") < 24 * 48, "it was killed too late to show anything"
    with log.open("a") as file:
        file.write('{"id": "p9", "sam')  # a line that the kill cut off
    text = run(*options, "--out", broken)
    assert "were there already" in text
    assert log.read_text().startswith(before)
    assert results(broken)["aime24"]["scores"] == results(whole)["aime24"]["scores"]

    def key(record: dict[str, Any]) -> tuple[str, int]:
        return record["id"], record["sample"]

    assert sorted(samples(broken, "aime24"), key=key) == sorted(samples(whole, "aime24"), key=key)


def test_noise_is_matched_and_more_samples_go_on(model: Path, problems: Path, tmp_path: Path) -> None:
    """Four samples are the first four of eight, whatever the chunks; another seed gives others."""
    options = ["--model", model, "--tasks", "gsm8k", "--data", f"gsm8k={problems}", "--max-tokens", "24", "--limit", "5"]
    run(*options, "--samples", "4", "--out", tmp_path / "four")
    four = {(r["id"], r["sample"]): r["text"] for r in samples(tmp_path / "four", "gsm8k")}
    run(*options, "--samples", "8", "--out", tmp_path / "four")
    eight = {(r["id"], r["sample"]): r["text"] for r in samples(tmp_path / "four", "gsm8k")}
    assert (len(four), len(eight)) == (20, 40)
    assert all(eight[key] == text for key, text in four.items())
    assert len(set(eight.values())) > 20
    run(*options, "--samples", "4", "--seed", "1", "--out", tmp_path / "other")
    other = {(r["id"], r["sample"]): r["text"] for r in samples(tmp_path / "other", "gsm8k")}
    assert sum(other[key] == text for key, text in four.items()) < 5


def test_greedy_is_one_sample(model: Path, problems: Path, tmp_path: Path) -> None:
    options = ["--model", model, "--tasks", "gsm8k", "--data", f"gsm8k={problems}", "--max-tokens", "8", "--limit", "3"]
    run(*options, "--samples", "4", "--temperature", "0", "--out", tmp_path / "out")
    assert [len(row) for row in results(tmp_path / "out")["gsm8k"]["scores"]] == [1, 1, 1]


def test_bad_input_gets_one_clear_line(model: Path, problems: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    base = ["--model", model, "--max-tokens", "8", "--out", tmp_path / "out"]
    data = ["--data", f"aime24={problems}"]
    assert "unknown task 'aime2'" in refused(*base, "--tasks", "aime2")
    assert "no data file" in refused(*base, "--tasks", "aime24", "--data", "aime24=nowhere.jsonl")
    assert "should look like --data aime25=" in refused(*base, "--tasks", "aime24", "--data", "file.jsonl")
    assert "not among the tasks" in refused(*base, "--tasks", "aime25", *data)
    assert "--samples must be at least 1" in refused(*base, "--tasks", "aime24", *data, "--samples", "0")
    assert "there is no such folder" in refused("--model", "./nowhere", "--tasks", "aime24", *data)
    assert "--step needs a run directory" in refused(*base, "--step", "4", "--tasks", "aime24", *data)
    assert "max_position_embeddings" in refused(
        "--model", model, "--out", tmp_path / "long", "--tasks", "aime24", *data, "--max-tokens", "9000"
    )
    offline = refused(*base, "--tasks", "hmmt25", "--limit", "1")
    assert "give a local file: --data TASK=FILE" in offline
    bare = save_byte_model(tmp_path / "bare", chat=False)
    assert "--no-chat" in refused("--model", bare, "--tasks", "aime24", *data, "--out", tmp_path / "bare-out")


def test_a_folder_is_not_mixed_up(model: Path, problems: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    out = tmp_path / "out"
    options = ["--model", model, "--tasks", "aime24", "--data", f"aime24={problems}", "--samples", "2", "--limit", "2"]
    run(*options, "--max-tokens", "8", "--out", out)
    before = (out / "samples-aime24.jsonl").read_bytes()
    assert "max_tokens: 8 -> 9" in refused(*options, "--max-tokens", "9", "--out", out)
    problems.write_text(problems.read_text().replace("What is 0 + 0?", "What is 0 * 0?"))
    assert "the problem 'p0' was another one" in refused(*options, "--max-tokens", "8", "--out", out)
    assert (out / "samples-aime24.jsonl").read_bytes() == before


def test_in_training_the_same_code_and_the_best_checkpoint(tmp_path: Path) -> None:
    """Evaluation in training is what `iwopd eval` says of the checkpoint, and the best one outlives the newest two."""
    settings = save_pair(tmp_path)
    tasks = tmp_path / "digits.toml"
    tasks.write_text('checker = "exact"\nfile = "digits.jsonl"\n')
    (tmp_path / "digits.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "problem": f"{i}+{i}", "answer": str(i)}) + "\n" for i in range(8))
    )
    settings = {
        **settings,
        "steps": 8,
        "eval": {"tasks": [str(tasks)], "every": 2, "samples": 3, "prompts": 8},
        "checkpoint": {"every": 2, "keep": 1, "best": "digits"},
    }
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(settings))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    records = list(RunDirectory(tmp_path / "run").read("evals.jsonl"))
    assert [record["step"] for record in records] == [0, 2, 4, 6, 8]
    assert all(sum(record["outcomes"].values()) == 24 for record in records)
    best = max(records[1:], key=lambda record: (record["mean"], -record["step"]))["step"]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert kept == {f"step-{best:06d}", "step-000008"}
    run("--model", tmp_path / "run", "--tasks", tasks, "--samples", "3", "--max-tokens", "24", "--out", tmp_path / "out")
    assert results(tmp_path / "out")["digits"]["scores"] == records[-1]["scores"]

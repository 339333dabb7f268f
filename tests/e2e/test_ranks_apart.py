"""Two real training processes: each checks its own answers, and one that waits too long for the other says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models import save_byte_model
from ranks import train_in_ranks

PROBLEMS = 5
TIMEOUT = 20
BEFORE = """
import dataclasses, signal, time
from iwopd.rollout.local import LocalSampler
from iwopd.train import assembly
rank, load, write = os.environ["RANK"], assembly.load_tasks, LocalSampler.sample

def counting(task):
    def check(prompts, texts):
        with open(os.environ["CHECKED"] + rank, "a") as file:
            file.write(f"{len(texts)} ")
        return task.check(prompts, texts)
    return dataclasses.replace(task, check=check)

def sample(self, *given, step, **more):
    if rank == "1" and step == 2:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends it
        time.sleep(600)
    return write(self, *given, step=step, **more)

assembly.load_tasks = lambda *given: [counting(task) for task in load(*given)]
LocalSampler.sample = sample
"""


@pytest.mark.slow
def test_two_processes_share_the_checks_and_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation is shared out; in the second step one process hangs."""
    monkeypatch.setattr("ranks.ENVIRONMENT", {**__import__("ranks").ENVIRONMENT, "CHECKED": str(tmp_path / "checked")})
    models = {name: str(save_byte_model(tmp_path / name, seed=seed)) for seed, name in enumerate(("student", "teacher"))}
    prompts = [{"id": f"p{number}", "prompt": f"{number}+{number}"} for number in range(8)]
    problems = [{"id": f"q{number}", "problem": f"{number}+1", "answer": str(number + 1)} for number in range(PROBLEMS)]
    for name, lines in (("prompts", prompts), ("problems", problems)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "steps": 3,
        "threads": 1,
        "rank_timeout": TIMEOUT,
        "models": models,
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 2, "max_tokens": 4},
        "eval": {"tasks": ["aime25"], "data": {"aime25": str(tmp_path / "problems.jsonl")}, "every": 9, "max_tokens": 4},
        "tracking": {"console": "off"},
    }
    said = train_in_ranks(2, settings, tmp_path / "run", before=BEFORE, code=1, launcher=True)
    assert f"process 0 of 2 waited {TIMEOUT} seconds for another one (rank_timeout)" in said
    assert "raise rank_timeout" in said
    assert [(tmp_path / f"checked{rank}").read_text() for rank in (0, 1)] == ["3 ", "2 "]
    (evaluation,) = (json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines())
    assert (evaluation["step"], evaluation["task"]) == (0, "aime25")

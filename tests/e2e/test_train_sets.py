"""Training on a mixture of sets: real small runs, and a resumed one that sees what it would have seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from iwopd.config import make_config
from iwopd.train.assembly import assemble
from iwopd.train.run import run_training
from models import save_pair


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two models, a set of sums in our own schema, and one of differences in another, with a teacher's name."""
    folder = tmp_path_factory.mktemp("mixture")
    settings = save_pair(folder)
    with (folder / "differences.jsonl").open("w") as file:
        for number in range(10):
            file.write(json.dumps({"question": f"{number}-1", "level": number, "who": "subtractor"}) + "\n")
    difference = {"prompt_field": "question", "teacher_field": "who", "filter": "level >= 4"}
    sets = [
        {"source": str(folder / "prompts.jsonl"), "name": "sums", "weight": 3, "teacher": "adder"},
        {"source": str(folder / "differences.jsonl"), "weight": 1, **difference},
    ]
    others = {name: {"model": settings["models"]["teacher"]} for name in ("adder", "subtractor")}
    return {**settings, "steps": 4, "data": {"sets": sets}, "teacher": {"others": others}}


def test_the_order_of_a_mixture(mixture: dict[str, Any]) -> None:
    said: list[str] = []
    parts = assemble(make_config(mixture), said.append)
    batch = parts.order.batch(1)
    assert sorted(p.id.partition("/")[0] for p in batch) == ["differences"] * 4 + ["sums"] * 12
    assert {(p.id.partition("/")[0], p.teacher) for p in batch} == {("differences", "subtractor"), ("sums", "adder")}
    assert said == ["sums: 48 prompts", "differences: 6 prompts, 4 left out by its filter"]


def test_a_resumed_run_goes_on_with_the_same_prompts(mixture: dict[str, Any], tmp_path: Path) -> None:
    whole = run_training(make_config(mixture), tmp_path / "whole")
    run_training(make_config({**mixture, "steps": 2}), tmp_path / "halves")
    halves = run_training(make_config(mixture), tmp_path / "halves", resume=True)
    assert whole.step == halves.step == 4

    def losses(name: str) -> list[float]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert losses("whole") == losses("halves")
    assert len(losses("whole")) == 4


def test_other_shares_are_another_run(mixture: dict[str, Any], tmp_path: Path) -> None:
    from iwopd.runs.logs import RunError

    run_training(make_config({**mixture, "steps": 1}), tmp_path / "run")
    first, second = mixture["data"]["sets"]
    changed = {**mixture, "data": {"sets": [{**first, "weight": 1}, second]}}
    changed["rollout"] = {**mixture["rollout"], "prompts_per_step": 8}
    with pytest.raises(RunError, match="training prompts: fingerprint"):
        run_training(make_config(changed), tmp_path / "run", resume=True)

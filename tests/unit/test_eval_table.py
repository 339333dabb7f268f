"""What `iwopd eval` and the demo print is the documented interval: never certain after a handful of problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd import demo
from iwopd.eval.present import print_results
from iwopd.eval.statistics import interval_over_problems


def result(right: int, problems: int) -> dict[str, Any]:
    scores = [[1.0] if place < right else [0.0] for place in range(problems)]
    return {"scores": scores, "aggregate": "mean@1", "outcomes": {"correct": right}, "truncated": 0, "mean_tokens": 3.0}


def test_five_of_five_is_not_certain(capsys: pytest.CaptureFixture[str]) -> None:
    results = {"all": result(5, 5), "none": result(0, 4), "some": result(11, 30)}
    print_results(results, Path("out"), as_json=True)
    tasks = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
    assert (tasks["all"]["mean"], tasks["all"]["low"], tasks["all"]["high"]) == (100.0, 47.82, 100.0)  # 0.025 ** (1 / 5)
    assert tasks["none"]["low"] == 0.0
    assert tasks["none"]["high"] == pytest.approx(100 * (1 - 0.025 ** (1 / 4)), abs=0.01)
    documented = interval_over_problems([torch.tensor(results["some"]["scores"]).double().mean(1)]).times(100)
    assert [tasks["some"][name] for name in ("low", "high")] == [round(documented.low, 2), round(documented.high, 2)]


def test_the_demo_says_the_same() -> None:
    assert demo._interval(torch.ones(5, 1)) == (100.0, 47.82, 100.0)

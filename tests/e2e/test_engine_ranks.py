"""Several training processes and one rollout server: shares of the prompts, one sender of weights, faults that all hear of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from iwopd.config import make_config
from iwopd.train.run import run_training
from models import save_byte_model
from ranks import train_in_ranks
from rollout_server import RolloutServer, serving


def settings(folder: Path, url: str, **changes: Any) -> dict[str, Any]:
    """Three prompts a step and one in the evaluation, of which the second of two ranks gets one and none."""
    models = {name: str(save_byte_model(folder / name, seed=seed)) for name, seed in (("student", 1), ("teacher", 2))}
    prompts = [{"id": f"p{number}", "prompt": f"{number}+{number}"} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "problems.jsonl").write_text(json.dumps({"id": "a", "problem": "1+1", "answer": "2"}) + "\n")
    evaluation = {"tasks": ["aime25"], "data": {"aime25": str(folder / "problems.jsonl")}, "every": 2, "max_tokens": 8}
    tree = {
        "steps": 3,
        "threads": 1,
        "models": models,
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"engine": "server", "prompts_per_step": 3, "samples": 2, "max_tokens": 12},
        "engine": {"server": {"url": url, "weights_folder": str(folder / "weights"), "patience": 2.0}},
        "optim": {"lr": 1e-3},
        "eval": {**evaluation, "prompts": 1, "samples": 1},
        "tracking": {"console": "off"},
    }
    return {**tree, **changes}


def model(folder: Path, seed: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_byte_model(folder, seed=seed), dtype=torch.float32)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_share_a_server(tmp_path: Path) -> None:
    """The same run as that of one process: same rollouts, weights sent once a step, by one rank, before anybody writes."""
    asked: dict[int, Counter[str]] = {}
    for count in (1, 2):
        server = RolloutServer(model(tmp_path / "other", seed=5), max_model_len=2048)  # other weights at first
        with serving(server) as url:
            if count == 1:
                run_training(make_config(settings(tmp_path, url)), tmp_path / "run1")
            else:
                train_in_ranks(2, settings(tmp_path, url), tmp_path / "run2")
        asked[count] = Counter(server.asked)
    one, two = metrics(tmp_path / "run1"), metrics(tmp_path / "run2")
    assert [step["step"] for step in two] == [1, 2, 3]
    for single, double in zip(one, two, strict=True):
        assert double["tokens"] == single["tokens"]
        assert double["loss"] == pytest.approx(single["loss"], abs=1e-5)
        assert double["correction/ratio_deviation"] < 1e-3
    assert asked[2]["/collective_rpc"] == asked[1]["/collective_rpc"] == 4  # before each step, and after the last
    # The checks before the first step are those of every rank; the rollouts are shared out.
    checks = 2 + 3
    assert asked[2]["/v1/completions"] == asked[1]["/v1/completions"] + checks
    last = [load_file(tmp_path / f"run{count}/checkpoints/step-000003/model/model.safetensors") for count in (1, 2)]
    assert max(float((last[0][name] - last[1][name]).abs().max()) for name in last[0]) < 1e-5


LOST = """
if os.environ["RANK"] == "1":
    from iwopd.rollout import connection, server
    complete = server.ServerEngine._complete
    def lose(self, fields):
        if os.path.exists({marker!r}):
            raise connection.ServerError("the line is cut")
        return complete(self, fields)
    server.ServerEngine._complete = lose
"""


@pytest.mark.slow
def test_a_server_that_one_rank_loses_ends_all(tmp_path: Path) -> None:
    """Nobody waits for the rank that failed: both say why, and the finished steps are kept."""
    marker = tmp_path / "cut"

    class Cutting(RolloutServer):
        def answer(self, path: str, body: Any) -> Any:
            if path == "/collective_rpc" and self.asked.count(path) == 1:  # the weights of step 2
                marker.touch()
            return super().answer(path, body)

    with serving(Cutting(model(tmp_path / "other", seed=5), max_model_len=2048)) as url:
        tree = settings(tmp_path, url, eval={"prompts": 0})
        said = train_in_ranks(2, tree, tmp_path / "run", before=LOST.format(marker=str(marker)), code=1, launcher=True)
    assert said.count("the line is cut") == 2
    assert said.count("Step 1 was the last finished one and is saved") == 2
    assert "]: Traceback" not in said  # torchrun has one of its own
    assert (tmp_path / "run/checkpoints/step-000001/manifest.json").exists()

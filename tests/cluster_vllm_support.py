"""For tests/cluster_vllm: jobs of verl with vLLM's own replicas on tiny models and CPU."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl_vllm_testing
from cluster_support import Job
from iwopd.cluster.verl.translate import response_tokens
from iwopd.config import Config, make_config
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.tiny import open_world
from iwopd.train.learner import Learner
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns, training_progress
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from verl_vllm_testing import SYNCED
from vllm_support import IDS, save_model

STEPS = 3

RUN_SECONDS = 3600
"""For a job of three steps: three to five minutes on two free cores, more on busy ones."""

RECIPE = """
seed = 0
steps = {steps}
[models]
world = "clean"
[rollout]
prompts_per_step = 16
[engine.vllm]
eager = true
[optim]
lr = 0.0003
[checkpoint]
every = 1
keep = {steps}
[tracking]
console = "off"
[cluster]
gpus_per_node = {gpus}
teacher_gpus = 1
overrides = ["trainer.rollout_data_dir={folder}"]
[method]
{method}
"""
"""Every worker of the student has a rollout replica; one teacher. The learning rate moves the student within a few steps."""

IW_OPD = 'weights = "cumulative-share"\n[method.params]\ngamma = 0.5'
FORWARD_KL = 'objective = "divergence"\ndivergence = "forward-kl"\nsupport = "top-k"\nk = 4\nweights = "linear-decay"'


def train(folder: Path, *, workers: int, method: str) -> Job:
    """`iwopd train --engine verl` into `folder / "run"`.

    vLLM's weights after each sync are left in `folder / "synced"`, its answers, as text, in `folder / "written"`.
    """
    (folder / "synced").mkdir(parents=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(steps=STEPS, gpus=workers + 1, folder=folder / "written", method=method))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--engine", "verl", "--out", str(folder / "run")]
    variables = {**verl_vllm_testing.environment(), SYNCED: str(folder / "synced")}
    return Job(command, log=folder / "log.txt", variables=variables)


# --- what the replicas are asked --------------------------------------------------------------------------------------------


def questions(folder: Path) -> dict[str, Any]:
    """Of the world's student, and of a random model with more rows in its output matrix than the tokenizer has ids."""
    world, random = open_world("clean").student, save_model(folder / "random", seed=2)
    tokenizer = AutoTokenizer.from_pretrained(world)
    problems = ["9+3+7+5*4+1?", "1*2-7*3+9-4?", "8-8*2+6*6-1?", "5+5*5-5*5+5?"]
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randint(2, IDS, (length,), generator=generator).tolist() for length in (3, 9, 40, 130)]
    prompts = [[tokenizer(problem, add_special_tokens=False)["input_ids"] for problem in problems], noise]
    return {"models": [str(world), str(random)], "prompts": prompts, "max_tokens": 48, "k": 4}


# --- what a job leaves behind -----------------------------------------------------------------------------------------------


def held_by_vllm(folder: Path, replica: int) -> list[dict[str, Tensor]]:
    """Weights that vLLM held after each sync, under their names in the checkpoints."""
    files = folder.glob(f"replica-{replica}-rank-0-sync-*.safetensors")
    config = json.loads((open_world("clean").student / "config.json").read_text())
    heads, keys, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    packed = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), (heads * size, keys * size, keys * size)),
        "gate_up_proj": (("gate_proj", "up_proj"), (config["intermediate_size"],) * 2),
    }

    def unpacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, values in weights.items():
            layer = name.split(".")[-2]
            if layer in packed:
                parts, rows = packed[layer]
                found |= {name.replace(layer, part): own for part, own in zip(parts, values.split(rows), strict=True)}
            else:
                found[name] = values[: config["vocab_size"]] if layer == "embed_tokens" else values  # vLLM adds rows
        return found

    return [unpacked(load_file(file)) for file in sorted(files, key=lambda file: int(file.stem.rpartition("-")[2]))]


@dataclass(frozen=True)
class Followed:
    """Our learner after the steps of a job, on the job's rollouts."""

    losses: list[float]
    tokens: list[int]
    moved: float
    """Distance of its weights from the start."""
    apart: float
    """Their distance from the job's last checkpoint."""


def follow(folder: Path) -> Followed:
    """The steps of a job by the local learner and scorers."""
    config = make_config(tomllib.loads((folder / "recipe.toml").read_text()))
    world = open_world("clean")
    student, teacher = _load(world.student), _load(world.teacher)
    start = {name: values.detach().clone() for name, values in student.named_parameters()}
    learner = Learner(ResponseModel(student), config.optim, config.method.made, Ranks())
    losses, tokens = [], []
    for step in range(1, STEPS + 1):
        rollouts = written(config, folder / "written" / f"{step}.jsonl")
        ours = LocalScorer(student).look(rollouts)
        theirs = LocalScorer(teacher).look(rollouts, learner.objective.asks.teacher)
        scored = [
            ScoredRollout(rollout, old.logprobs, new.logprobs, more=learner.objective.further_evidence(old, new))
            for rollout, old, new in zip(rollouts, ours, theirs, strict=True)
        ]
        batch = TokenBatch.collate(scored)
        columns = loss_columns(learner.objective, batch, evidence_of(batch, progress=training_progress(step, STEPS)))
        losses.append(learner.update(batch, columns, seed=0, step=step).loss)
        tokens.append(sum(map(len, rollouts)))
    there = load_file(folder / "run" / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors")
    here = dict(student.named_parameters())
    moved = _norm([values - start[name] for name, values in here.items()])
    return Followed(losses, tokens, moved, _norm([values - there[name] for name, values in here.items()]))


def written(config: Config, path: Path) -> list[Rollout]:
    """The rollouts of a step, from verl's file of their texts, in which the end of an answer is not told."""
    tokenizer = AutoTokenizer.from_pretrained(open_world("clean").student)
    limit = response_tokens(config)
    rollouts = []
    for number, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        prompt, answer = (tokenizer(entry[name], add_special_tokens=False)["input_ids"] for name in ("input", "output"))
        ended = len(answer) < limit
        ids = torch.tensor([*answer, *([tokenizer.eos_token_id] if ended else [])])
        rollouts.append(Rollout(Prompt(str(number), tuple(prompt)), ids, torch.zeros(len(ids)), "eos" if ended else "length"))
    return rollouts


def _load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.detach().flatten().double() for tensor in tensors]).norm())

"""Processes of the sharded learner: `python shard_ranks.py FOLDER`, for test_sharding. All is imported once, then forked.

For 1, 2, 4 and again 1 processes: two steps of every case from the same weights and rollouts, checkpoints that are read from
the processes before and written again, and one more step of a whole run. At last the same run in one process.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor

from iwopd.adapters import add_adapter
from iwopd.algo.objectives import make_objective
from iwopd.config import Optim, make_config
from iwopd.lm import Sequences
from iwopd.teacher.local import LocalScorer
from iwopd.train.average import Average
from iwopd.train.checkpoint import CheckpointStore
from iwopd.train.learner import Learner, Update
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks
from iwopd.train.run import run_training
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import make_model
from waiting import PATIENCE

WORLDS = (1, 2, 4, 1)
"""How many processes train in each turn; the last one only goes on."""
VOCABULARY = 21
COPIED = ("half precision", "kl and entropy")
"""Cases whose checkpoints are handed on."""


@dataclass(frozen=True)
class Case:
    """An update that must come out the same whatever the number of processes."""

    kind: str = "qwen3"
    method: dict[str, Any] = field(default_factory=lambda: {"weights": "cumulative-share"})
    optim: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    lora: bool = False
    broken: bool = False
    """In the first step one token's advantage is not a number."""


ONE_BY_ONE = {"token_budget": 1}
"""A rollout at a time, so that half precision rounds the same sums everywhere."""
CASES = {
    "kl and entropy": Case(
        method={"weights": "cumulative-share", "kl_coef": 0.1, "entropy_coef": 0.1}, optim={"ppo_epochs": 2, "mini_batches": 2}
    ),
    "divergence": Case("llama", {"objective": "divergence"}, {"gradient_checkpointing": True}),
    "adapter": Case(lora=True, dtype=torch.bfloat16, optim={"gradient_checkpointing": True, **ONE_BY_ONE}),
    "soft cap": Case("gemma2"),
    "half precision": Case(dtype=torch.bfloat16, optim=ONE_BY_ONE),
    "half precision, not sharded": Case(dtype=torch.bfloat16, optim={"shard": False, **ONE_BY_ONE}),
    "autocast": Case(autocast=True, optim=ONE_BY_ONE),
    "not finite": Case("gpt2", broken=True),
}


class Training:
    """A learner with what it needs, the same in every process."""

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self.case = case
        self.model = make_model(case.kind).to(case.dtype)
        if case.lora:
            torch.manual_seed(7)
            add_adapter(self.model, 3, 8.0, ["all-linear"])
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        bf16: Callable[[], AbstractContextManager[Any]] = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
        autocast = bf16 if case.autocast else nullcontext
        self.student = LocalScorer(self.model, vocab_size=VOCABULARY, autocast=autocast)
        self.student.check_head(Sequences.from_rollouts(rollouts()[:2]), trained=True)
        self.teacher = LocalScorer(make_model("llama", seed=5), vocab_size=VOCABULARY)
        self.reference = LocalScorer(make_model(case.kind, seed=6), vocab_size=VOCABULARY)
        self.objective = make_objective(case.method)
        # A large epsilon: Adam's step is then nearly linear in the gradient, and does not make whole steps of its rounding.
        optim = Optim(**{"shard": True, "lr": 1e-2, "eps": 1e-3, "grad_clip": 0.5, "token_budget": 24, **case.optim})
        whole = Distributions.of(self.teacher) if self.objective.needs_teacher_distribution else None
        self.average = Average(self.model, 0.5)
        self.learner = Learner(self.student.lm, optim, self.objective, ranks, whole, average=self.average)

    def update(self, step: int) -> Update:
        items = rollouts()
        scores = (scorer.score(items) for scorer in (self.student, self.teacher, self.reference))
        batch = TokenBatch.collate([ScoredRollout(*one) for one in zip(items, *scores, strict=True)])
        columns = loss_columns(self.objective, batch, evidence_of(batch))
        if self.case.broken and step == 1:
            columns["advantages"][len(items[0])] = math.nan  # of the second rollout: the second process's, if there is one
        return self.learner.update(batch, columns, seed=0, step=step)

    def held(self) -> dict[str, int]:
        """Bytes in this process when the optimizer steps; `student`: of the plain copy beside what is trained."""
        beside = self.model is not self.learner.lm.model
        return {
            "weights": sum(part(one).nbytes for one in self.learner.weights.parameters),
            "gradients": sum(part(one.grad).nbytes for one in self.learner.weights.parameters if one.grad is not None),
            "frozen": sum(part(one).nbytes for one in self.learner.lm.model.parameters() if not one.requires_grad),
            "student": sum(one.untyped_storage().nbytes() for one in self.model.parameters()) if beside else 0,
        }

    def moments(self) -> int:
        states = self.learner.optimizer.state.values()
        return sum(part(value).nbytes for state in states for name, value in state.items() if name != "step")


def rollouts() -> list[Rollout]:
    """Seven, so that with four processes one has fewer; the longest fill micro-batches alone."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate([9, 3, 14, 1, 9, 12, 6]):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, VOCABULARY, (2 + number,), generator=generator).tolist()))
        made.append(
            Rollout(prompt, torch.randint(1, VOCABULARY, (length,), generator=generator), torch.zeros(length), "length")
        )
    return made


def part(tensor: Any) -> Tensor:
    """What this process has of it."""
    mine: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine


def run_case(case: Case, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two steps; the student's weights after each, the optimizer's tensors, and what was seen."""
    training = Training(case, ranks)
    held: dict[str, int] = {}
    training.learner.optimizer.register_step_pre_hook(lambda *_: held.update(training.held()))
    tensors, seen = {f"0/{name}": one.detach().clone() for name, one in training.model.named_parameters()}, []
    for step in (1, 2):
        update = training.update(step)
        seen.append({"loss": update.loss, "norm": update.grad_norm, "skipped": update.skipped, **update.stats.as_dict()})
        tensors |= {f"{step}/{name}": one.detach().clone() for name, one in training.model.named_parameters()}
    tensors |= {f"optimizer/{name}": one.clone() for name, one in training.learner.optimizer_state().tensors.items()}
    tensors |= {f"average/{name}": one.clone() for name, one in training.average.tensors.items()}
    held["moments"] = training.moments()
    return tensors, {"steps": seen, "bytes": held, "fused": training.student.lm.fused}


def hand_on(ranks: Ranks, source: Path, target: Path) -> None:
    """Read a checkpoint of other processes into weights that are wrong, and write it again; the first one makes it."""
    for name in COPIED:
        training = Training(CASES[name], ranks)
        learner = training.learner
        checkpoint = CheckpointStore(source / name).latest()
        if checkpoint is None:
            training.update(1)
        else:
            with torch.no_grad():
                for parameter in learner.weights.parameters:
                    parameter.add_(1.0)
            checkpoint.load_model_weights(training.model)
            learner.weights.follow_student()
            checkpoint.load_optimizer(learner.optimizer, learner.weights.masters)
        with learner.weights.updating():  # the student is written as it comes out of the shards
            pass
        state = learner.optimizer_state()
        if ranks.is_main:
            CheckpointStore(target / name).save(1, model=training.model, optimizer=state, state={})
        ranks.gather(None)


def run_rank(folder: Path, turn: int, rank: int, port: int) -> None:
    world = WORLDS[turn]
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"turn{turn}-rank{rank}.log", os.O_CREAT | os.O_WRONLY), 2)
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    Accelerator(cpu=True)
    ranks = Ranks()
    assert ranks.count == world
    for name, case in CASES.items() if world not in WORLDS[:turn] else ():
        tensors, seen = run_case(case, ranks)
        everyone = ranks.gather(seen)
        if ranks.is_main:
            save_file(tensors, folder / f"{name}-{world}.safetensors")
            (folder / f"{name}-{world}.json").write_text(json.dumps(everyone))
    hand_on(ranks, folder / f"copies-{turn - 1}", folder / f"copies-{turn}")
    settings = json.loads((folder / "run.json").read_text())
    config = make_config({**settings, "steps": turn + 1})
    run_training(config, folder / "run", resume=turn > 0, doctor=world == 2)
    if turn + 1 == len(WORLDS):
        run_training(config, folder / "alone", doctor=False)


def main(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    for turn, world in enumerate(WORLDS):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [context.Process(target=run_rank, args=(folder, turn, rank, port)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
        waiting = [process for process in processes if process.is_alive()]
        for process in waiting:
            process.kill()
        if waiting or any(process.exitcode for process in processes):
            sys.exit(f"{world} processes ended with {[process.exitcode for process in processes]}, {len(waiting)} hung")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Three steps of the embedded world on the device, against the same three steps on the CPU.

Task, tokenizer and sizes are those of the world `clean`; the models are untrained, so that nothing has to be trained first.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from safetensors.torch import load_file

from iwopd import tiny
from iwopd.config import Config
from iwopd.tiny.architecture import STUDENT_SIZES, TEACHER_SIZES, new_model
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.doctor.gpu.devices import variables
from iwopd.train.doctor.gpu.isolation import Ended, run_together

STEPS = 3
SECONDS = 900
REMEDY = "if the lines above pass, this is a fault of iwopd: report it with this whole output; else repair what they name first"


class Tolerance(NamedTuple):
    """How far a run may be from the CPU's in float32."""

    loss: float
    """Largest difference of a step's loss, and of its mean |gap|, relative to the latter."""
    weights: float
    """Norm of the difference of both updates, relative to the CPU's update."""


FLOAT32 = Tolerance(loss=1e-3, weights=0.02)
"""Another attention kernel on a CPU: 2e-7 and 6e-5."""
BFLOAT16 = Tolerance(loss=0.25, weights=1.0)
"""Rounding changes some draws, and the rollouts after them: what it learns is similar, not the same. On a CPU: 0.07 and 0.4;
another seed: 0.1 and 1.2."""


@dataclass(frozen=True)
class Distance:
    """Between two runs."""

    loss: float
    weights: float
    same_tokens: bool
    """Whether both wrote the same rollouts, as far as their lengths tell."""

    def within(self, tolerance: Tolerance) -> bool:
        return self.loss <= tolerance.loss and self.weights <= tolerance.weights


def check_steps(device: str, config: Config | None, folder: Path) -> Iterator[Finding]:
    """In float32, and in bfloat16 autocast: with the method of a recipe, else importance-weighted."""
    settings = save_tiny(folder)
    if config is not None:
        settings["method"] = json.loads(config.method.model_dump_json(exclude_none=True))
    exact = folder / "cpu"
    (ended,) = train(settings, exact, "cpu")
    if ended.code != 0:
        yield failure("steps", f"training on the CPU {ended.how}: there is nothing to compare with", REMEDY, ended.words)
        return
    for precision, tolerance in (("no", FLOAT32), ("bf16", BFLOAT16)):
        name = "float32" if precision == "no" else "bfloat16 autocast"
        run = folder / precision
        (ended,) = train({**settings, "precision": precision}, run, device)
        if ended.code != 0:
            yield failure("steps", f"training in {name} on {device} {ended.how}", REMEDY, ended.words)
            continue
        found = distance(exact, run, folder / "student")
        yield judged(f"{STEPS} steps in {name} on {device}", found, tolerance)


def judged(what: str, found: Distance, tolerance: Tolerance) -> Finding:
    words = (
        f"{what}: losses within {found.loss:.1g} of the CPU's float32 ones (at most {tolerance.loss:g}), updates within "
        f"{found.weights:.1g} (at most {tolerance.weights:g})"
    )
    if found.within(tolerance):
        return passed("steps", words)
    if not found.same_tokens and found.within(BFLOAT16):
        message = f"{words}, but other tokens were drawn: rounding can move a draw that lies between two ids"
        return warning("steps", message, "run the checklist again; if it happens every time, report it with this whole output")
    return failure("steps", words, REMEDY)


def save_tiny(folder: Path) -> dict[str, Any]:
    """Student, teacher and prompts in a folder; returns the settings of three steps."""
    world = tiny.planned_world(tiny.world_recipe(tiny.DEFAULT_WORLD))
    for name, size in (("student", STUDENT_SIZES["medium"]), ("teacher", TEACHER_SIZES["strong"])):
        model: Any = new_model(size, f"iwopd/doctor/{name}")
        with torch.no_grad():
            model.model.norm.weight.mul_(3)  # untrained models say nearly the same of all tokens
        model.save_pretrained(folder / name)
        world.tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"id": prompt.id, "prompt": prompt.metadata["expression"]}) + "\n" for prompt in world.prompts(48)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return {
        "steps": STEPS,
        "threads": 1,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 16, "max_tokens": 48},
        "optim": {"lr": 1e-3},
        "checkpoint": {"every": STEPS},
        "method": {"weights": "cumulative-share"},
        "tracking": {"console": "off"},
    }


def train(settings: Mapping[str, Any], run: Path, device: str, *, ranks: int = 1, seconds: float = SECONDS) -> list[Ended]:
    """`iwopd train` in processes of their own, one for each rank (each on a GPU of its own, if there are several)."""
    logs = run.with_name(f"{run.name}-output")
    logs.mkdir()
    recipe = logs / "recipe.toml"
    recipe.write_text(tomli_w.dumps(settings))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--out", str(run)]
    own = variables(device) if ranks == 1 or device == "cpu" else {}
    each = [own | more for more in _launched(ranks)]
    return run_together([command] * ranks, each, seconds=seconds, folder=logs)


def _launched(ranks: int) -> list[dict[str, str]]:
    """A launcher's variables for each rank; none for a single process."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**meeting, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def distance(exact: Path, run: Path, student: Path) -> Distance:
    """Between the run directories of two runs that began with the same student."""
    ours, theirs = _records(exact), _records(run)
    losses = [
        max(abs(a["loss"] - b["loss"]), abs(a["gap/abs_mean"] - b["gap/abs_mean"])) / a["gap/abs_mean"]
        for a, b in zip(ours, theirs, strict=True)
    ]
    first = load_file(student / "model.safetensors")
    last = [load_file(one / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors") for one in (exact, run)]
    update, other = (torch.cat([(end[name] - first[name]).double().flatten() for name in first]) for end in last)
    lengths = [[(one["tokens"], one["rollout/length_max"]) for one in records] for records in (ours, theirs)]
    same = lengths[0] == lengths[1]
    return Distance(max(losses), float((update - other).norm() / update.norm()), same)


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

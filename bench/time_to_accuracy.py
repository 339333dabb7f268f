"""Seconds of training until an accuracy is reached: ours with every horizon, and TRL's IWOPDTrainer. CPU, float32, one thread.

    python bench/time_to_accuracy.py --trl-python PATH --runs DIR   # all worlds, lineages, arms and learning rates: hours
    python bench/time_to_accuracy.py --runs DIR --worlds clean --lineages 4 --arms opd/full trl --rates 4   # some of them
    python bench/time_to_accuracy.py --runs DIR --report            # the tables of the runs that are there

An arm is `method/horizon` (ours), `trl` or `trl-kl`. All arms of a lineage begin with the same student and get the same prompts
in the same order, temperature 1, top-p 1, AdamW at a constant rate with the same weight decay and clipping. After every fifth
step the student answers the same 400 problems with the same noise, TRL's student too (saved weights, our sampler). Seconds are
those of the training steps: no loading, evaluating or saving. CPU seconds count; wall time is in the JSON.

The target is 90 % of what OPD with full rollouts reaches at step 40 in the same lineage: in `clean` at the world's own learning
rate (`default`), in `drift` at the best of all rates (`best`), because at its own rate OPD makes that student worse, and 90 %
of the result is less than the untrained student has. The moment of arrival is interpolated linearly between the first
evaluation at or above the target and the one before. An arm counts at the learning rate, one for all lineages, at which most
lineages arrive, then soonest (geometric mean). A run stops once it has reached its target.

TRL is set up to its advantage: one micro-batch a step (it generates each by itself), rows with a right solution, which it never
trains on but whose length is its loss's denominator (without them: NaN; all right solutions of a world are equally long, so the
denominator is right), its own gamma, epsilon and fused AdamW, no logging. `trl-kl` is the same trainer with its reverse KL over
the full vocabulary (`distillation_objective="jsd"`, beta 1, loss_top_k 0).

Exit code 1 if a bar is missed: TRL needs at least 4 times our seconds in `clean` (arm `kl/drift`) and 10 times in `drift`
(`kl-survival/drift`), geometric mean over lineages; where TRL does not arrive, its 40 steps count, a lower bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy_tables import REFERENCE, Curves, Points, Row, arm_rows, overall, spread, table, targets

STEPS, EVERY, PROBLEMS = 40, 5, 400
RATES = (2.0, 4.0, 8.0)
STOP = {"threshold": 0.5, "block": 8}
"""Where an answer stops: the defaults, written out so that kept runs of other settings are made again."""
CHILD = Path(__file__).with_name("accuracy_curve.py")
TRL_ARMS: dict[str, dict[str, Any]] = {
    "trl": {"distillation_objective": "iw_opd"},
    "trl-kl": {"distillation_objective": "jsd", "beta": 1.0, "loss_top_k": 0},
}


@dataclass(frozen=True)
class World:
    """A world's recipe, as docs/results.md has it, and what is compared in it."""

    lr: float
    prompts: int
    horizons: dict[str, dict[str, Any]]
    arms: tuple[str, ...]
    judged: str
    bar: float
    target: str


WORLDS = {
    "clean": World(
        lr=1e-4,
        prompts=64,
        horizons={"fixed": {"tokens": 32}, "growing": {"from": 16}, "drift": STOP, "budget": {"tokens": 64 * 64, **STOP}},
        arms=(
            *("iw-opd/full", "kl/full"),
            *(f"opd/{name}" for name in ("fixed", "growing", "drift", "budget")),
            *(f"kl/{name}" for name in ("fixed", "growing", "drift", "budget")),
        ),
        judged="kl/drift",
        bar=4.0,
        target="default",
    ),
    "drift": World(
        lr=2e-4,
        prompts=32,
        horizons={"fixed": {"tokens": 48}, "growing": {"from": 24}, "drift": STOP, "budget": {"tokens": 32 * 102, **STOP}},
        arms=(
            *("iw-opd/full", "survival/full", "kl-survival/full"),
            *(f"survival/{name}" for name in ("fixed", "growing", "drift", "budget")),
            *(f"kl-survival/{name}" for name in ("fixed", "growing", "drift", "budget")),
        ),
        judged="kl-survival/drift",
        bar=10.0,
        target="best",
    ),
}


# --- runs -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One run: where it is kept and what it is made of."""

    world: str
    lineage: int
    arm: str
    rate: float
    runs: Path

    @property
    def key(self) -> tuple[str, int, str, float]:
        return self.world, self.lineage, self.arm, self.rate

    @property
    def folder(self) -> Path:
        return self.runs / f"{self.world}-{self.lineage}-{self.arm.replace('/', '+')}-x{self.rate:g}"

    @property
    def title(self) -> str:
        return f"{self.world}, lineage {self.lineage}, {self.arm}, lr x {self.rate:g}"

    def settings(self) -> dict[str, Any]:
        """As `iwopd train` reads them."""
        from iwopd.methods import METHODS

        world = WORLDS[self.world]
        name, _, horizon = "opd/full".partition("/") if self.arm in TRL_ARMS else self.arm.partition("/")
        rollout: dict[str, Any] = {"prompts_per_step": world.prompts}
        if horizon != "full":
            rollout["horizon"] = {"type": horizon, **world.horizons[horizon]}
        return {
            "seed": 0,
            "steps": STEPS,
            "threads": 1,
            "models": {"world": self.world, "lineage": self.lineage},
            "rollout": rollout,
            "optim": {"lr": world.lr * self.rate},
            "eval": {"every": EVERY, "prompts": PROBLEMS},
            "method": METHODS[name],
            "tracking": {"console": "off"},
        }

    def curve(self, enough: float = math.inf) -> Points | None:
        """The kept curve, if it was made with these settings and is complete, or has reached `enough`."""
        try:
            spec, points = (json.loads((self.folder / name).read_text()) for name in ("made.json", "curve.json"))
        except FileNotFoundError:
            return None
        whole = points[-1]["step"] == STEPS or max(point["accuracy"] for point in points) >= enough
        same = spec["settings"] == json.loads(json.dumps(self.settings())) and spec.get("trl") == self.trl_settings()
        return points if same and whole else None

    def trl_settings(self) -> dict[str, Any] | None:
        if self.arm not in TRL_ARMS:
            return None
        from iwopd import tiny
        from iwopd.config import make_config

        world, optim = WORLDS[self.world], make_config(self.settings()).optim
        longest = tiny.planned_world(tiny.world_recipe(self.world, lineage=self.lineage)).max_response_tokens
        return {
            **TRL_ARMS[self.arm],
            "per_device_train_batch_size": world.prompts,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "max_length": 512,
            "max_completion_length": longest,
            "learning_rate": optim.lr,
            "lr_scheduler_type": "constant",
            "weight_decay": optim.weight_decay,
            "max_grad_norm": optim.grad_clip,
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": 0,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "fp16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "logging_steps": 1000,
        }

    def make(self, trl_python: str | None, enough: float) -> None:
        if self.arm in TRL_ARMS and not trl_python:
            sys.exit(f"{self.title}: give the python of TRL's environment with --trl-python or IWOPD_TRL_PYTHON")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        spec = {"folder": str(self.folder), "settings": self.settings(), "trl": self.trl_settings(), "enough": min(enough, 2.0)}
        (self.folder / "made.json").write_text(json.dumps(spec))
        if trl_python and self.arm in TRL_ARMS:
            both = [(trl_python, spec | {"who": "trl"} | self._trl_data()), (sys.executable, spec | {"who": "evaluate"})]
        else:
            both = [(sys.executable, spec | {"who": "ours"})]
        children(self.folder, both)

    def _trl_data(self) -> dict[str, Any]:
        """Model folders, and the prompts of all steps in our order, each with a right solution."""
        from iwopd import tiny
        from iwopd.config import make_config
        from iwopd.data.prompts import PromptOrder
        from iwopd.tiny.task import right_solution

        config = make_config(self.settings())
        world = tiny.open_world(tiny.world_recipe(self.world, lineage=self.lineage))
        order = PromptOrder(world.prompts(config.data.train_size), config.rollout.prompts_per_step, config.seed)
        asked = [str(prompt.metadata["expression"]) for step in range(1, STEPS + 1) for prompt in order.batch(step)]
        rows = [
            {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": right_solution(one)}]}
            for one in asked
        ]
        return {"rows": rows, "student": str(world.student), "teacher": str(world.teacher)}


def children(folder: Path, specs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """A process for each, of one thread; their output stays beside the run. If one fails, all end."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **quiet}
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for python, spec in specs:
            name = str(folder / spec["who"])
            Path(f"{name}.json").write_text(json.dumps(spec))
            with Path(f"{name}.log").open("w") as log:
                words = [python, str(CHILD), f"{name}.json"]
                running[name] = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        while any(process.poll() is None for process in running.values()):
            time.sleep(0.2)
            for name, process in running.items():
                if process.poll():
                    sys.exit(f"{name} failed:\n{Path(f'{name}.log').read_text()[-3000:]}")
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def planned(options: argparse.Namespace) -> list[Plan]:
    """Lineage by lineage, OPD first: it sets the targets."""
    found = []
    for lineage in options.lineages:
        for name in options.worlds:
            arms = options.arms or [REFERENCE, *WORLDS[name].arms, *TRL_ARMS]
            for arm in [one for one in (REFERENCE, *TRL_ARMS) if one in arms] + [
                one for one in arms if one not in (REFERENCE, *TRL_ARMS)
            ]:
                own = [1.0] if arm == REFERENCE and 1.0 not in options.rates else []
                found += [Plan(name, lineage, arm, rate, options.runs) for rate in [*own, *options.rates]]
    return found


def collect(plans: Iterable[Plan]) -> Curves:
    found = {plan.key: plan.curve(-1.0) for plan in plans}
    return {key: points for key, points in found.items() if points}


def enough_for(plan: Plan) -> float:
    """The accuracy at which a run may stop: its target, if that is known by now."""
    opd = collect(Plan(plan.world, plan.lineage, REFERENCE, rate, plan.runs) for rate in (1.0, *RATES))
    wanted, name = targets(opd, plan.world, plan.lineage, STEPS), WORLDS[plan.world].target
    sets_it = plan.arm == REFERENCE and (name == "best" or plan.rate == 1.0)
    return math.inf if sets_it else wanted.get(name, math.inf)


def run_all(plans: Sequence[Plan], options: argparse.Namespace) -> None:
    for number, plan in enumerate(plans, 1):
        enough = enough_for(plan)
        if plan.curve(enough):
            continue
        began = time.monotonic()
        plan.make(options.trl_python, enough)
        points = plan.curve(enough) or []
        told = " ".join(f"{point['accuracy']:.0%}" for point in points)
        print(f"[{number}/{len(plans)}] {plan.title}: {time.monotonic() - began:.0f} s; {told}", flush=True)


# --- what came out ----------------------------------------------------------------------------------------------------------


def report(curves: Curves, worlds: Sequence[str], lineages: Sequence[int]) -> tuple[dict[str, Any], bool]:
    """Print tables and bars; returns what the JSON holds of them, and whether all bars are met."""
    summary, met = {}, True
    for name in worlds:
        world = WORLDS[name]
        goals = {one: targets(curves, name, one, STEPS) for one in lineages}
        there = [one for one in lineages if world.target in goals[one]]
        if not there:
            print(f"\n{name}: no target yet, {REFERENCE} has not been run to the end")
            continue
        base = {one: next(of for key, of in curves.items() if key[:2] == (name, one))[0]["accuracy"] for one in there}
        tables = {}
        for target in dict.fromkeys(("default", world.target)):
            known = [one for one in there if target in goals[one]]
            said = ", ".join(f"{goals[one][target]:.1%} ({base[one]:.1%}) in lineage {one}" for one in known)
            print(f"\n{name}, target `{target}` (untrained student): {said}")
            if len(known) < len(there) or any(goals[one][target] <= base[one] for one in known):
                print("no table: a lineage lacks this target, or its untrained student has reached it already")
                continue
            tables[target] = arm_rows(curves, name, there, {one: goals[one][target] for one in there})
            print("\n".join(["CPU seconds (steps)\n", *table(tables[target], there)]))
        judged = next((row for row in tables.get(world.target, []) if row.arm == world.judged), None)
        ok = judged is not None and len(judged.ratios) == len(there) and overall(judged.ratios).value >= world.bar
        met &= ok
        shown = spread(judged.ratios, len(there)) if judged else "not run in all lineages"
        print(f"\n{'ok  ' if ok else 'MISS'} {name}: TRL / {world.judged}: {shown} (bar {world.bar:g})")
        rows = {target: [_as_json(row) for row in of] for target, of in tables.items()}
        summary[name] = {"targets": goals, "untrained": base, "rows": rows}
    return summary, met


def _as_json(row: Row) -> dict[str, Any]:
    ratios = [{"value": one.value, "bound": one.bound} for one in row.ratios]
    return {"arm": row.arm, "rate": row.rate, "seconds": row.seconds, "steps": row.steps, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs; finished ones are read, not made again")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--lineages", nargs="+", type=int, default=[4, 5, 6])
    parser.add_argument("--arms", nargs="+", help="method/horizon, trl or trl-kl; without it: all of a world")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="multiples of the world's learning rate")
    parser.add_argument("--trl-python", default=os.environ.get("IWOPD_TRL_PYTHON"), help="python of an environment with TRL")
    parser.add_argument("--report", action="store_true", help="run nothing; print what the runs so far say")
    parser.add_argument("--json", type=Path, help="write summary and curves to this file")
    options = parser.parse_args()
    if not options.report:
        run_all(planned(options), options)
    everything = argparse.Namespace(**vars(options) | {"arms": None, "rates": [1.0, *RATES]})
    curves = collect(planned(everything))
    summary, met = report(curves, options.worlds, options.lineages)
    if options.json:
        rows = [dict(zip(("world", "lineage", "arm", "rate"), key, strict=True)) | {"points": of} for key, of in curves.items()]
        options.json.write_text(json.dumps({"summary": summary, "curves": rows}, indent=1) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()

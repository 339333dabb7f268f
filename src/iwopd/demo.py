"""`iwopd demo`: on-policy distillation and its position bias, on a laptop, in minutes. Everything in it is real but small.

Left out on purpose: hyperparameter search, several lineages (one `--lineage` at a time), and any claim that one run could
not support.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM

from iwopd import tiny
from iwopd.analysis.handoff import handoff_scores
from iwopd.analysis.reproduce.tables import show
from iwopd.config import ConfigError, make_config
from iwopd.eval.runner import evaluate
from iwopd.eval.statistics import Interval, interval_over_problems
from iwopd.eval.task import Task, one_by_one
from iwopd.methods import METHODS, TITLES
from iwopd.report import write_report
from iwopd.rollout.engine import LOCAL, EngineChoice, Student
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.runs.reading import Run
from iwopd.stages import ConsoleStages, StageListener
from iwopd.tiny import task as tiny_task
from iwopd.train.many import PlannedRun, run_all
from iwopd.train.progress import pretraining_progress
from iwopd.types import Rollout

Folders = dict[tuple[str, int], Path]  # by method and seed
EVAL_PROMPTS = 1000
FRACTIONS = tuple(tenth / 10 for tenth in range(10))
MARK = ".iwopd-demo"


@dataclass(frozen=True)
class Outcome:
    """What came out, in percent."""

    base: Interval
    teacher: Interval
    methods: dict[str, dict[int, Interval]]  # by step
    handoff: dict[float, Interval]  # by the share that the student wrote


def tiny_settings(world: str = tiny.DEFAULT_WORLD) -> dict[str, Any]:
    """What the recipes of the embedded world share: everything but `[method]`."""
    return {
        "seed": 0,
        "steps": 40,
        "models": {"world": world, "lineage": 0},
        "rollout": {"prompts_per_step": 64},
        "optim": {"lr": 1e-4},
        "eval": {"every": 10, "prompts": EVAL_PROMPTS},
        "checkpoint": {"every": 10},
    }


def run_demo(options: argparse.Namespace, engine: EngineChoice) -> int:
    """Run the demonstration and print what came out."""
    began = time.perf_counter()
    console = Console(stderr=options.json)
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    _check(options, names)
    with pretraining_progress() as progress:
        recipe = tiny.world_recipe(options.world or tiny.DEFAULT_WORLD, lineage=options.lineage)
        world = tiny.open_world(recipe, refresh=options.refresh, progress=progress)
    _print_task(console, world)
    runs = _prepare(options, names, engine)
    folders = {key: run.folder for key, run in runs.items()}
    torch.set_num_threads(1)  # two wait for each other on a busy machine
    run_all(list(runs.values()), at_a_time=options.jobs, console=console)
    with ConsoleStages() as stages:
        stages.stage("the student before training answers", EVAL_PROMPTS)
        base, rollouts = _accuracy(world, world.student, options.first_seed, stages, engine)
        stages.stage("the teacher answers", EVAL_PROMPTS)
        teacher, _ = _accuracy(world, world.teacher, options.first_seed, stages)
        stages.stage("the teacher finishes what the student began", EVAL_PROMPTS)
        found = Outcome(base, teacher, _collect(folders), _handoff(world, rollouts, stages))
        stages.stage("writing the report", 1)
        page = _report(options, folders, found)
        stages.advance(1)

    _print_table(console, found, options.seeds)
    _print_handoff(console, found)
    _print_rollout(console, folders)
    _print_meaning(console, found)
    seconds = time.perf_counter() - began
    console.print(f"\n{seconds:.0f} s; run directories in {options.out}", highlight=False)
    console.print(f"report: open {page} in a browser", highlight=False, soft_wrap=True)
    _print_next(console, folders, options.out)
    if options.json:
        print(json.dumps(_as_json(found, seconds, folders)))
    return 0


def _check(options: argparse.Namespace, names: list[str]) -> None:
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise ConfigError(f"unknown method {unknown[0] if unknown else ''!r}; choose from {', '.join(METHODS)}")
    for name in ("seeds", "steps", "jobs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.world is not None and options.world not in tiny.WORLDS:
        raise ConfigError(f"unknown world {options.world!r}; choose from {', '.join(tiny.WORLDS)}")
    out: Path = options.out
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} holds something that is not a demo's; choose another directory with --out")


def _prepare(options: argparse.Namespace, names: list[str], engine: EngineChoice) -> dict[tuple[str, int], PlannedRun]:
    """The runs, in fresh directories."""
    if options.out.exists():
        shutil.rmtree(options.out)
    options.out.mkdir(parents=True)
    (options.out / MARK).touch()
    runs = {}
    for name in names:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            settings = tiny_settings(options.world or tiny.DEFAULT_WORLD)
            settings |= {"seed": seed, "steps": options.steps, "threads": 1, "method": METHODS[name]}
            settings["tracking"] = {"console": "off"}
            settings["engine"] = {engine.name: engine.settings.model_dump(exclude_unset=True)}
            settings["models"] |= {"lineage": options.lineage}
            settings["rollout"] |= {"engine": engine.name}
            folder = options.out / f"{name}-seed{seed}"
            runs[name, seed] = PlannedRun(f"{TITLES[name]}, seed {seed}", folder, make_config(settings))
    return runs


@contextmanager
def _sampler(world: tiny.World, folder: Path, engine: EngineChoice = LOCAL) -> Iterator[Sampler]:
    tokenizer: Any = world.tokenizer
    with engine.open(Student.of(AutoModelForCausalLM.from_pretrained(folder), tokenizer)) as opened:
        yield opened.sampler(SamplingSettings(world.max_response_tokens, stop_ids={tokenizer.eos_token_id}))


def _accuracy(
    world: tiny.World, folder: Path, seed: int, stages: StageListener, engine: EngineChoice = LOCAL
) -> tuple[Interval, list[Rollout]]:
    task = Task("tiny", world.eval_prompts(EVAL_PROMPTS), one_by_one(world.check))
    with _sampler(world, folder, engine) as sampler:
        sampler.progress = stages.advance
        evaluation = evaluate(task, lambda prompts: sampler.sample(prompts, seed=seed, step=0), world.tokenizer)
    return _interval(evaluation.result.scores), evaluation.rollouts


def _handoff(world: tiny.World, rollouts: list[Rollout], stages: StageListener) -> dict[float, Interval]:
    with _sampler(world, world.teacher) as teacher:
        check = one_by_one(world.check)
        scores = handoff_scores(
            rollouts, teacher, world.tokenizer, check, fractions=FRACTIONS, advance=lambda count: stages.advance(count)
        )
    return {fraction: _interval(score) for fraction, score in scores.items()}


def _report(options: argparse.Namespace, folders: Folders, found: Outcome) -> Path:
    """The hand-off curve as a file beside the runs, and the page."""
    record = {
        "format": 1,
        "world": options.world or tiny.DEFAULT_WORLD,
        "problems": EVAL_PROMPTS,
        "fractions": {f"{fraction:g}": interval._asdict() for fraction, interval in found.handoff.items()},
        "student": found.base._asdict(),
        "teacher": found.teacher._asdict(),
    }
    handoff_file = options.out / "handoff.json"
    handoff_file.write_text(json.dumps(record, indent=1) + "\n")
    return write_report(list(folders.values()), options.out / "report.html", handoff=handoff_file)


def _collect(folders: Folders) -> dict[str, dict[int, Interval]]:
    """Accuracy of each method at each evaluated step: mean over problems and seeds, interval over problems."""
    gathered: dict[str, dict[int, list[torch.Tensor]]] = {}
    for (name, _), folder in folders.items():
        for result in Run(folder).evals:
            gathered.setdefault(name, {}).setdefault(result.step or 0, []).append(result.scores)
    return {
        name: {step: _interval(torch.cat(scores, 1)) for step, scores in steps.items() if step}
        for name, steps in gathered.items()
    }


def _print_task(console: Console, world: tiny.World) -> None:
    """What is asked of the models: without it `4*3=2` looks like a mistake."""
    problem, *_ = tiny_task.distinct_problems(world.recipe.operands, "eval", random.Random("demo"), 1)
    first = tiny_task.right_solution(problem).splitlines()[0]
    console.print("The task", style="bold")
    console.print(
        "The last digit of an arithmetic expression, products first. Every result is kept modulo 10, so 4*3=2 (of 12) and "
        f"3-5=8 are right. The solution of {problem} begins {first} (one operation, then what is left); a wrong one works from "
        "left to right. One early mistake usually costs the answer.",
        highlight=False,
        markup=False,
    )


def _print_table(console: Console, found: Outcome, seeds: int) -> None:
    title = f"Accuracy in percent, 95 % intervals over {EVAL_PROMPTS} problems, {seeds} seed(s)"
    table = Table(title=title, title_justify="left")
    evaluated = {step for steps in found.methods.values() for step in steps}
    columns = sorted({10, max(evaluated)} & evaluated)
    table.add_column("method")
    for step in columns:
        table.add_column(f"step {step}", justify="right")
    table.add_row("Base (student before)", *([""] * (len(columns) - 1)), show(found.base))
    for name, steps in found.methods.items():
        table.add_row(TITLES[name], *(show(steps[step]) if step in steps else "" for step in columns))
    table.add_row("Teacher", *([""] * (len(columns) - 1)), show(found.teacher))
    console.print()
    console.print(table)


def _print_handoff(console: Console, found: Outcome) -> None:
    console.print("\nThe student begins, the teacher finishes: accuracy by the share the student wrote")
    for fraction, (mean, _, _) in {**found.handoff, 1.0: found.base}.items():
        alone = "  (the student alone)" if fraction == 1 else ""
        console.print(f"  {fraction:>4.0%}  {mean:5.1f} %  {'█' * round(mean / 2)}{alone}", highlight=False)


def _print_rollout(console: Console, folders: Folders) -> None:
    """A wrong answer of the untrained student, each token coloured by its IW-OPD weight."""
    key = next((key for key in folders if key[0] == "iw-opd"), next(iter(folders)))
    records = [record for record in Run(folders[key]).log("rollouts.jsonl") if record["step"] == 0]
    record = next((record for record in records if not record["correct"]), records[0] if records else None)
    if record is None:
        return
    verdict = "right" if record["correct"] else f"wrong; right is {record['answer']}"
    console.print(f"\nOne answer before training ({verdict}; all results modulo 10):")
    console.print("background: token weight, high (green) to low (grey); red text: the teacher would hardly have written it")
    text = Text(record["prompt"].strip() + "\n")
    low, high = min(record["weights"]), max(record["weights"])
    for token, weight, gap in zip(record["tokens"], record["weights"], record["gap"], strict=True):
        share = (weight - low) / (high - low) if high > low else 1.0
        background = f"rgb({round(70 - 40 * share)},{round(70 + 50 * share)},{round(70 - 20 * share)})"
        text.append(token, style=f"{'bold red' if gap < -2 else 'white'} on {background}")
    console.print(text)
    ends = f"{record['weights'][0]:.2f} at the first token, {record['weights'][-1]:.2f} at the last"
    drift = next((place for place, gap in enumerate(record["gap"]) if gap < -2), None)
    where = f"; first drift at token {drift + 1} of {len(record['gap'])}" if drift is not None else ""
    console.print(f"weights: {ends}{where}")


def _print_meaning(console: Console, found: Outcome) -> None:
    last = {name: steps[max(steps)] for name, steps in found.methods.items()}
    first, final = found.handoff[FRACTIONS[0]].mean, found.handoff[FRACTIONS[-1]].mean
    console.print("\nWhat this shows, and what it does not", style="bold")
    say = partial(console.print, highlight=False)
    say(
        f"The teacher is right {first:.0f} % of the time from the start and {final:.0f} % after nine tenths of the student's "
        f"answer ({first - final:.0f} points less): late in a drifted answer it has little left to teach."
    )
    if {"prefix-30", "suffix-30"} <= last.keys():
        prefix, suffix = last["prefix-30"].mean, last["suffix-30"].mean
        say(
            f"Training on the first 30 % of tokens ends at {prefix:.0f} %, on the last 30 % at {suffix:.0f} % (base "
            f"{found.base.mean:.0f} %): where the supervision stands matters more than how much."
        )
    if {"opd", "iw-opd"} <= last.keys():
        difference = last["iw-opd"].mean - last["opd"].mean
        half = max(last[name].high - last[name].low for name in ("iw-opd", "opd")) / 2
        say(
            f"IW-OPD ends {difference:+.1f} points from OPD, {'within' if abs(difference) < half else 'beyond'} the interval "
            "of either. One seed cannot tell them apart; at this scale the paper's gain is small if it is there at all. Models "
            "of 0.1 to 0.3 million parameters and answers of some 64 tokens show the bias; they do not show what it costs a "
            "large model."
        )


def _print_next(console: Console, folders: Folders, out: Path) -> None:
    """Commands that go on from here."""
    two = [shlex.quote(str(folder)) for folder in list(folders.values())[:2]]
    commands = [f"iwopd runs {shlex.quote(str(out))}", *([f"iwopd compare {' '.join(two)}"] if len(two) > 1 else [])]
    commands += ["iwopd probe --world clean", "iwopd train my.toml  (your own models: docs/train-your-own.md)"]
    console.print("next: " + commands[0], *commands[1:], sep="\n      ", highlight=False, soft_wrap=True, markup=False)


def _as_json(found: Outcome, seconds: float, folders: Folders) -> dict[str, Any]:
    return {
        "teacher_accuracy": found.teacher.mean,
        "base_accuracy": found.base.mean,
        "methods": {name: {str(step): one._asdict() for step, one in steps.items()} for name, steps in found.methods.items()},
        "handoff": {f"{fraction:g}": interval.mean for fraction, interval in found.handoff.items()},
        "seconds": round(seconds, 1),
        "runs": [str(folder) for folder in folders.values()],
    }


def _interval(scores: torch.Tensor) -> Interval:
    """Of scores [N, K] (problems x samples or seeds), over problems, in percent."""
    return Interval(*(round(100 * value, 2) for value in interval_over_problems([scores.double().mean(1)])))

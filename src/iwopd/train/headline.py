"""What a run says of itself before it begins, and which commands come after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from iwopd.config import Config
from iwopd.methods import method_title
from iwopd.runs.logs import Notes
from iwopd.runs.reading import Run
from iwopd.train.card import model_name


def headline(config: Config) -> list[tuple[str, str]]:
    """Name and content of each line: models and method."""
    served = f", served at {', '.join(config.teacher.urls)}" if config.teacher.urls else ""
    others = f", and {len(config.teacher.others)} more" if config.teacher.others else ""
    rollout = config.rollout
    size = f"{config.steps} steps of {rollout.prompts_per_step} prompts"
    size += f" x {rollout.samples} answers" if rollout.samples > 1 else ""
    return [
        ("student", model_name(config, "student", paths=True)),
        ("teacher", f"{model_name(config, 'teacher', paths=True)}{served}{others}"),
        ("method", f"{method_title(config.method.model_dump())}, {size}, seed {config.seed}"),
    ]


def ending(folder: Path) -> list[str]:
    """The result of a run that has reached its last step, and what can be done with it."""
    run, path = Run(folder, notes=Notes()), shlex.quote(str(folder))
    tasks = list(dict.fromkeys(one.task for one in run.evals))
    lines = []
    for task in tasks:
        first, *_, last = [one for one in run.evals if one.task == task] * 2
        before = f"{100 * first.mean:.1f} % before training, " if first.step == 0 else ""
        lines.append(f"{task}: {before}{100 * last.mean:.1f} % after step {last.step}")
    next_ones = {
        f"iwopd report {path} --open": "the page: curves, alerts, answers token by token",
        f"iwopd eval --model {path} --tasks {','.join(tasks) or 'TASK'}": "more problems, or other tasks",
        f"iwopd compare OTHER_RUN {path}": "against another run, problem by problem",
        f"iwopd export {path} OUT": "the student as a folder for from_pretrained",
    }
    width = max(map(len, next_ones))
    return [*lines, "next:", *(f"  {command:<{width}}  {why}" for command, why in next_ones.items())]


def resume_command(folder: Path) -> str:
    return f"iwopd train {shlex.quote(str(folder))} --resume"

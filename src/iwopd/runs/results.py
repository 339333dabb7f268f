"""Evaluation results of a training run (`evals.jsonl`) or of `iwopd eval` (`eval.json`): all that comparison needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from iwopd.config import defaults, flatten
from iwopd.methods import method_title
from iwopd.runs.evaluations import ResultsError, TaskResults, get_field, read_eval, read_task, short
from iwopd.runs.identity import method_settings, student_name
from iwopd.runs.reading import Run


@dataclass(frozen=True, eq=False)
class ModelResults:
    """All tasks of one trained (or untrained) model."""

    path: Path
    kind: Literal["run", "eval"]
    method: str
    """Title of the method: `OPD`, `IW-OPD`; `Base` for step 0 of a run; the folder's name if nothing says better."""
    student: str | None
    seed: int | None
    """Training seed; None if it is not known."""
    step: int | None
    settings: Mapping[str, Any]
    """How it was evaluated: temperature, samples, ..."""
    recipe: Mapping[str, Any]
    """Dotted training settings that repeats of one method share; empty for `iwopd eval`."""
    tasks: Mapping[str, TaskResults]
    every_setting: Mapping[str, Any] = field(default_factory=dict)
    """All dotted settings of a training run, defaults included; empty for `iwopd eval`."""


def load(path: Path, step: int | None = None) -> ModelResults:
    """Results of a directory of either kind. `step`: of a training run, default the last that was evaluated."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ResultsError(f"{path} {what}: give a run directory of `iwopd train` or the output directory of `iwopd eval`")
    if (path / "eval.json").exists():
        if step is not None:
            raise ResultsError(f"{path} is an evaluation of one model: a step can be chosen for training runs only")
        return _load_eval(path)
    if (path / "run.json").exists():
        return _load_run(Run(path), step)
    raise ResultsError(f"{path} holds neither eval.json (of `iwopd eval`) nor run.json (of `iwopd train`)")


def _load_eval(path: Path) -> ModelResults:
    content, file = read_eval(path), str(path / "eval.json")
    model = get_field(content, "model", str, file)
    tasks = get_field(content, "tasks", dict, file)
    if not tasks:
        raise ResultsError(f"{file}: tasks is empty; run `iwopd eval` again")
    for name, task in tasks.items():
        if not isinstance(task, dict):
            raise ResultsError(f"{file}: tasks.{name} must be an object, got {short(task)}")
    return ModelResults(
        path=path,
        kind="eval",
        method=get_field(content, "method", str, file, default=None) or path.absolute().name,
        student=get_field(content, "student", str, file, default=None) or _hub_name(model),
        seed=get_field(content, "train_seed", int, file, default=None),
        step=None,
        settings=get_field(content, "settings", dict, file),
        recipe={},
        tasks={name: read_task(name, task, f"{file}: tasks.{name}") for name, task in tasks.items()},
    )


def _load_run(run: Run, step: int | None) -> ModelResults:
    _ = run.about  # refuses a format that this version does not know
    steps = sorted({one.step for one in run.evals if one.step is not None})
    if not steps:
        raise ResultsError(
            f"{run.path} was never evaluated (evals.jsonl has no scores): evaluate it now, with `iwopd eval --model {run.path} "
            "--tasks TASK --out FOLDER`, and compare that folder; the next run does it by itself with eval.every and eval.tasks"
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ResultsError(f"{run.path} was not evaluated at step {chosen}; steps with evaluations: {_some(steps)}")
    evaluated, rollout = (run.setting(name, dict, {}) for name in ("eval", "rollout"))
    settings = {"samples": evaluated.get("samples"), "temperature": evaluated.get("temperature")}
    settings |= {"max_tokens": rollout.get("max_tokens"), "seed": run.seed}
    return ModelResults(
        path=run.path,
        kind="run",
        method="Base" if chosen == 0 else method_title(run.setting("method", dict, {})),
        student=student_name(run.setting("models", dict, {})),
        seed=run.seed,
        step=chosen,
        settings={name: value for name, value in settings.items() if value is not None},
        recipe=method_settings(run.config),
        tasks={one.task: TaskResults(one) for one in run.evals if one.step == chosen},
        every_setting={**dict(flatten(defaults())), **dict(flatten(run.config))},
    )


def _hub_name(model: str) -> str | None:
    """`Qwen/Qwen3-1.7B` names its model; a path to a checkpoint does not."""
    owner, _, name = model.rpartition("/")
    return name if name and not owner.strip(".").count("/") and not owner.startswith((".", "/")) else None


def _some(steps: list[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-5:]])

"""A whole run: set it up or bring it back, train, report how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from iwopd import algo, tiny
from iwopd.config import Config
from iwopd.rollout.engine import EngineError
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.errors import TeacherError
from iwopd.trackers import check_trackers
from iwopd.train.assembly import assemble
from iwopd.train.checkpoint import Checkpoint, CheckpointStore
from iwopd.train.display import Display, open_display
from iwopd.train.doctor import Finding, examine_models, examine_recipe, head_findings, refuse
from iwopd.train.evaluation import keep_best
from iwopd.train.examples import keep_examples
from iwopd.train.headline import headline, resume_command
from iwopd.train.loading import planned_world
from iwopd.train.loop import save, train
from iwopd.train.parts import Parts
from iwopd.train.ranks import Ranks, lost_contact
from iwopd.train.state import TrainingState, TrainingStoppedError
from iwopd.train.teacher_state import teacher_state
from iwopd.train.tracking import Tracker


def run_training(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    doctor: bool = True,
    progress: tiny.PretrainingListener | None = None,
    about: Mapping[str, Any] | None = None,
) -> TrainingState:
    """Train in `folder`, from the newest valid checkpoint with `resume`; with `doctor` refuse a recipe that fails a check.

    `progress` hears of a world's models while they are trained, by default the display. `about` is what else the `run.json` of
    a new run is to keep.
    """
    run = RunDirectory(folder)
    messages: list[str] = []
    if resume:  # fail before any model is loaded
        run.check_resumable("local")
    elif note := run.check_free():
        messages.append(note)
    check_trackers(config.tracking.trackers)
    try:
        with closing(open_display(config)) as display:
            display.about(headline(config))
            if doctor:
                examined = _examined(examine_recipe(config, folder), display, "checking the recipe")
                refuse(examined)
                messages += _warnings(examined)
            with assemble(config, messages.append, progress or display.activity.pretraining, display.activity) as parts:
                how = {"resume": resume, "allow_changes": allow_changes, "doctor": doctor}
                state = _train(config, parts, run, display, messages, about or {}, **how)
        Ranks().leave(together=True)  # the main one may still have been saving
        return state
    except (algo.NonFiniteError, FloatingPointError) as error:
        raise TrainingStoppedError(
            f"{error}: a model's log-probs are not numbers, so nothing can be learnt from them", 1
        ) from error
    except RuntimeError as error:
        if (lost := lost_contact(error, config.rank_timeout)) is None:
            raise
        raise lost from error
    finally:
        Ranks().leave(together=False)


def _train(
    config: Config,
    parts: Parts,
    run: RunDirectory,
    display: Display,
    messages: list[str],
    about: Mapping[str, Any],
    *,
    resume: bool,
    allow_changes: bool,
    doctor: bool,
) -> TrainingState:
    """Examine the models, open the run directory, bring back the last checkpoint, train.

    Of a new run the directory is made last: one that is refused leaves nothing.
    """
    parts.report_to(display.activity)
    display.teacher = teacher_state(config, parts.teacher_scorer)
    found = [] if resume else _examine(config, parts, run, display, 1, doctor=doctor)
    messages += _warnings(found)
    with ExitStack() as stack:

        def open_directory() -> None:
            if parts.ranks.is_main:
                stack.enter_context(run.owned(messages.append))
                data = parts.data_fingerprint()
                if resume:
                    run.check_resume(config, data, allow_changes=allow_changes)
                else:
                    run.create(config, data, more={**_models(config), **about})
                keep_examples(run.path, config, parts.tokenizer, parts.order.prompts, parts.foreign)

        parts.ranks.together(open_directory)  # the others wait for it
        store = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep, notify=messages.append)
        checkpoint = store.latest() if resume else None
        state = TrainingState() if checkpoint is None else _bring_back(checkpoint, parts)
        kept = -1 if checkpoint is None else state.step  # without a checkpoint step 0 is evaluated again, too

        def rewind() -> None:
            if resume and parts.ranks.is_main:
                keep_best(store, state.best_step)  # a run killed right after a save may not have come to it
                run.rewind(kept, messages.append)

        parts.ranks.together(rewind)
        if resume and state.step < config.steps:
            found = _examine(config, parts, run, display, state.step + 1, doctor=doctor)
            messages += _warnings(found)
        after = kept if resume else None
        shared: dict[str, Any] = {"after": after, "is_main": parts.ranks.is_main, "display": display}
        tracker = stack.enter_context(closing(Tracker(config, run, **shared)))
        tracker.facts = _facts(found, run)
        for message in messages:
            tracker.say(message)
        if resume:
            tracker.say(f"resuming {run.path} after step {state.step}")
        try:
            return train(config, parts, run, store, tracker, state)
        except (TeacherError, EngineError) as error:  # earlier steps are good
            words = _keep_finished(config, parts, run, store, state)
            raise TrainingStoppedError(f"{error}\n{words}", error.exit_code) from None
        except KeyboardInterrupt:  # the second one
            newest = f"the checkpoint of step {saved[-1]} is kept" if (saved := store.steps()) else "there is no checkpoint yet"
            raise TrainingStoppedError(
                f"stopped in step {state.step + 1}, which is lost; {newest}. Continue with `{resume_command(run.path)}`", 130
            ) from None


def _models(config: Config) -> dict[str, Any]:
    """What `run.json` says of the weights of an embedded world's models."""
    world = planned_world(config)
    return {} if world is None else {"models": world.weights}


def _keep_finished(config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, state: TrainingState) -> str:
    """Save the last finished step if it is not saved yet; says how to go on."""
    if state.step == 0:
        return "No step was finished; start again when it is back"
    if state.step not in store.steps():
        save(config, parts, run, store, state)
    command = resume_command(run.path)
    return f"Step {state.step} was the last finished one and is saved; continue with --resume when it is back: {command}"


def _examine(config: Config, parts: Parts, run: RunDirectory, display: Display, step: int, *, doctor: bool) -> list[Finding]:
    """The models at work, before `step`; raises if anything failed."""
    findings = examine_models(config, parts, run.path, step=step) if doctor else head_findings(parts)
    found = _examined(findings, display, "checking the models")
    refuse(found, optional=doctor)
    return found


def _examined(findings: Iterable[Finding], display: Display, stage: str) -> list[Finding]:
    """All of them; the display shows how far the checks are."""
    found = []
    display.activity.stage(stage)
    for finding in findings:
        found.append(finding)
        display.activity.detail = f"{finding.check} done"
    display.activity.stage("")
    return found


def _warnings(findings: Iterable[Finding]) -> list[str]:
    return [finding.text() for finding in findings if finding.level == "warn"]


def _facts(findings: Iterable[Finding], run: RunDirectory) -> dict[str, float]:
    """What the doctor measured. A resumed run keeps what was measured at its start: its records are those of one run."""
    first = next(run.read("metrics.jsonl"), {})
    return {name: first.get(name, number) for finding in findings for name, number in finding.numbers.items()}


def _bring_back(checkpoint: Checkpoint, parts: Parts) -> TrainingState:
    learner = parts.learner
    checkpoint.load_model_weights(parts.student)
    learner.weights.follow_student()
    checkpoint.load_optimizer(learner.optimizer, learner.weights.masters)
    if learner.average is not None and not checkpoint.load_average(learner.average):
        learner.average.restart(learner.weights.current())
    checkpoint.restore_rng()
    return TrainingState(**checkpoint.state)

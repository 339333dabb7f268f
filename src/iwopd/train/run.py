"""A whole run: set it up or bring it back, train, report how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from iwopd import algo, tiny
from iwopd.config import Config
from iwopd.rollout.engine import EngineError
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.teacher.errors import TeacherError
from iwopd.train.assembly import Parts, assemble
from iwopd.train.checkpoint import Checkpoint, CheckpointStore
from iwopd.train.doctor import Finding, examine_models, examine_recipe, head_findings, refuse
from iwopd.train.evaluation import keep_best
from iwopd.train.loop import save, train
from iwopd.train.ranks import Ranks, lost_contact
from iwopd.train.state import TrainingState, TrainingStoppedError
from iwopd.train.tracking import Tracker


def run_training(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    doctor: bool = True,
    progress: tiny.PretrainingListener | None = None,
) -> TrainingState:
    """Train in `folder`, from the newest valid checkpoint with `resume`; with `doctor` refuse a recipe that fails a check."""
    run = RunDirectory(folder)
    messages: list[str] = []
    if resume:
        if run.engine != "local":  # fail before any model is loaded
            raise RunError(f"{folder} is trained by {run.engine}: continue it with --engine {run.engine} --resume")
    else:
        run.check_free()
    try:
        if doctor:
            messages += _examined(examine_recipe(config, folder))
        with assemble(config, messages.append, progress) as parts:
            state = _train(config, parts, run, messages, resume=resume, allow_changes=allow_changes, doctor=doctor)
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
    config: Config, parts: Parts, run: RunDirectory, messages: list[str], *, resume: bool, allow_changes: bool, doctor: bool
) -> TrainingState:
    """Open the run directory, bring back the last checkpoint, examine the models, train."""
    data = parts.order.fingerprint()
    with closing(Tracker(config, run, is_main=parts.ranks.is_main)) as tracker:
        if parts.ranks.is_main:
            if resume:
                run.check_resume(config, data, allow_changes=allow_changes)
            else:
                run.create(config, data)
        parts.ranks.gather(None)  # the others wait for the directory
        store = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep, notify=messages.append)
        checkpoint = store.latest() if resume else None
        state = TrainingState() if checkpoint is None else _bring_back(checkpoint, parts)
        if resume and parts.ranks.is_main:
            keep_best(store, state.best_step)  # a run killed right after a save may not have come to it
            run.rewind(-1 if checkpoint is None else state.step)
        if state.step < config.steps:
            found = list(examine_models(config, parts, run.path, step=state.step + 1) if doctor else head_findings(parts))
            messages += _examined(found, optional=doctor)
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


def _keep_finished(config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, state: TrainingState) -> str:
    """Save the last finished step if it is not saved yet; says how to go on."""
    if state.step == 0:
        return "No step was finished; start again when it is back"
    if state.step not in store.steps():
        save(config, parts, run, store, state)
    return f"Step {state.step} was the last finished one and is saved; continue with --resume when it is back"


def _examined(findings: Iterable[Finding], *, optional: bool = True) -> list[str]:
    """What the doctor warns of; raises if anything failed."""
    found = list(findings)
    refuse(found, optional=optional)
    return [finding.text() for finding in found if finding.level == "warn"]


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

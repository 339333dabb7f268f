"""A whole run: set it up or bring it back, train, report how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from iwopd import algo, tiny
from iwopd.config import Config
from iwopd.rollout.http import ServerError
from iwopd.rollout.weights import WeightSyncError
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.teacher.errors import TeacherError
from iwopd.train.assembly import Parts, assemble
from iwopd.train.checkpoint import Checkpoint, CheckpointStore
from iwopd.train.doctor import Finding, examine_models, examine_recipe, refuse
from iwopd.train.evaluation import keep_best
from iwopd.train.loop import Progress, TrainingStoppedError, save, train
from iwopd.train.tracking import Tracker


def run_training(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    doctor: bool = True,
    progress: tiny.PretrainingListener | None = None,
) -> Progress:
    """Train in `folder`. With `resume`, go on from the newest valid checkpoint (or from the start if there is none).

    `doctor` examines the recipe first, and refuses it if anything fails.
    """
    run = RunDirectory(folder)
    messages: list[str] = []
    if resume:
        if run.engine != "local":  # fail before any model is loaded
            raise RunError(f"{folder} is trained by {run.engine}: continue it with --engine {run.engine} --resume")
    else:
        run.check_free()
    if doctor:
        messages += _examined(examine_recipe(config, folder))
    parts = assemble(config, messages.append, progress)
    data = parts.order.fingerprint()
    tracker = Tracker(config, run, is_main=parts.ranks.is_main)
    if parts.ranks.is_main:
        if resume:
            run.check_resume(config, data, allow_changes=allow_changes)
        else:
            run.create(config, data)
    parts.ranks.gather(None)  # the others wait for the directory
    try:
        store = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep, notify=messages.append)
        checkpoint = store.latest() if resume else None
        done = Progress() if checkpoint is None else _bring_back(checkpoint, parts)
        if resume and parts.ranks.is_main:
            keep_best(store, done.best_step)  # a run killed right after a save may not have come to it
            run.rewind(-1 if checkpoint is None else done.step)
        if doctor and done.step < config.steps:
            messages += _examined(examine_models(config, parts, folder, step=done.step + 1))
        for message in messages:
            tracker.say(message)
        if resume:
            tracker.say(f"resuming {folder} after step {done.step}")
        try:
            done = train(config, parts, run, store, tracker, done)
        except (TeacherError, ServerError, WeightSyncError) as error:  # earlier steps are good
            raise TrainingStoppedError(f"{error}\n{_keep_finished(config, parts, run, store, done)}", error.exit_code) from None
        parts.ranks.leave(together=True)  # the main one may still have been saving
        return done
    except (algo.NonFiniteError, FloatingPointError) as error:
        raise TrainingStoppedError(
            f"{error}: a model's log-probs are not numbers, so nothing can be learnt from them", 1
        ) from error
    finally:
        parts.close_engine()
        tracker.close()
        parts.ranks.leave(together=False)


def _keep_finished(config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, done: Progress) -> str:
    """Save the last finished step if it is not saved yet; says how to go on."""
    if done.step == 0:
        return "No step was finished; start again when it is back"
    if done.step not in store.steps():
        save(config, parts, run, store, done)
    return f"Step {done.step} was the last finished one and is saved; continue with --resume when it is back"


def _examined(findings: Iterable[Finding]) -> list[str]:
    """What the doctor warns of; raises if anything failed."""
    found = list(findings)
    refuse(found)
    return [
        finding.text() for finding in found if finding.level == "warn" and finding.check != "fused head"
    ]  # the loop says it


def _bring_back(checkpoint: Checkpoint, parts: Parts) -> Progress:
    checkpoint.load_model_weights(parts.student)
    checkpoint.load_optimizer(parts.learner.optimizer)
    checkpoint.restore_rng()
    state = checkpoint.state
    return Progress(**state)

"""The loop. It does not know which method it runs: it asks the objective that the settings chose."""

from __future__ import annotations

from dataclasses import asdict
from signal import Signals

from iwopd.config import Config
from iwopd.runs.directory import RunDirectory
from iwopd.train.card import model_card
from iwopd.train.checkpoint import CheckpointStore
from iwopd.train.evaluation import evaluate_tasks, is_due, keep_best
from iwopd.train.given import Given
from iwopd.train.headline import resume_command
from iwopd.train.horizon import stops_at_once
from iwopd.train.interrupts import interrupts
from iwopd.train.kept import dump_skipped
from iwopd.train.metrics import Clock, metrics_without_rollouts, step_metrics
from iwopd.train.mismatch import check_engine, mismatch_metrics
from iwopd.train.mix import mix_metrics
from iwopd.train.parts import Parts
from iwopd.train.pipeline import look
from iwopd.train.scoring import loss_columns, score_step, write_rollouts
from iwopd.train.state import TrainingState, TrainingStoppedError
from iwopd.train.teacher_cache import cache_metrics
from iwopd.train.tracking import Tracker
from iwopd.types import StepStats

MOST_SKIPPED = 3
"""Steps in a row whose update may be skipped before the run gives up."""


def train(
    config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, tracker: Tracker, state: TrainingState
) -> TrainingState:
    """Train from the step after `state.step` to the last one."""
    parts.agreement = state.agreement
    with interrupts(tracker.display.stopping) as interrupted:
        if state.step < config.steps:
            check_engine(config, parts, state.step + 1)
        if _evaluate(config, parts, run, tracker, state):  # before the first step, or what an interrupted one left out
            save(config, parts, run, store, state)
        first = state.step + 1
        for step in range(first, config.steps + 1):
            stats = take_step(config, parts, run, step, state.prompts(config.rollout.horizon.made.tokens_per_step))
            state.finished(stats)
            parts.agreement = state.agreement
            tracker.step(stats)
            if parts.rewards and (notice := parts.rewards.notice()):
                tracker.say(notice)
            if step == first and (notice := stops_at_once(config, stats)):
                tracker.say(notice)
            better = _evaluate(config, parts, run, tracker, state)
            if state.skipped_in_a_row >= MOST_SKIPPED:
                raise TrainingStoppedError(
                    f"loss or gradient was not finite in {MOST_SKIPPED} steps in a row, up to step {step}; no such update "
                    f"touched the weights, and the batches lie in {run.path}. Lower optim.lr, or look at the dumps",
                    exit_code=1,
                )
            stop = max(parts.ranks.gather(interrupted[0] if interrupted else 0))  # all ranks stop after the same step
            if step % config.checkpoint.every == 0 or step == config.steps or stop or better:
                save(config, parts, run, store, state)
            if stop:
                raise TrainingStoppedError(
                    f"stopped by {Signals(stop).name} after step {step}; continue with --resume: {resume_command(run.path)}",
                    128 + stop,
                )
    return state


def take_step(config: Config, parts: Parts, run: RunDirectory, step: int, prompts: int | None = None) -> StepStats:
    """One step: write, score, weigh, update. `prompts`: how many, if not the usual."""
    clock, objective = Clock(parts.activity, step), parts.objective
    clock.begin("rollout")
    written = write_rollouts(config, parts, step, prompts)
    clock.begin("teacher", len(written.rollouts))
    if parts.others and not written.rollouts:
        return _given_step(config, parts, run, step, written.given, clock)
    scored = score_step(config, parts, written, step)
    parts.rest_teachers()
    mismatch = {} if parts.engine.exact else mismatch_metrics(config, parts, scored.batch, step)
    clock.begin("signal")
    signal = objective.signal(scored.evidence)
    columns = loss_columns(objective, scored.batch, scored.evidence, signal)
    batch, weights, others = scored.batch, signal.weights[scored.batch.mask], scored.others
    if others is not None:
        batch, columns, weights = others.join(batch), others.columns(columns), others.follow(weights)
    clock.begin("update", len(batch) * config.optim.ppo_epochs)
    update = parts.learner.update(batch, columns, seed=config.seed, step=step, forward=scored.forward)
    clock.end()
    if update.skipped and parts.ranks.is_main:
        dump_skipped(run.path, batch, {**columns, "weights": weights}, step)
    metrics = step_metrics(scored, signal, written, update, objective) | mismatch | cache_metrics(parts.caches, parts.ranks)
    if parts.others:
        metrics |= mix_metrics(written.given, others, metrics["prompts"], update)
    skipped = update.skipped > 0
    return StepStats(step, update.loss, update.grad_norm, update.tokens, len(written.rollouts), skipped, clock.laps, metrics)


def _given_step(config: Config, parts: Parts, run: RunDirectory, step: int, given: Given, clock: Clock) -> StepStats:
    """A step all of whose answers are others': supervised fine-tuning."""
    assert parts.others is not None
    forward = parts.learner.forward(given.rollouts)
    old = look(parts.student_scorer, parts.ranks, given.rollouts) if forward is None else forward.scores
    others = parts.others.score(given, old, parts.teacher_scorer, parts.ranks)
    assert others is not None
    if not others.supervised.any():
        raise TrainingStoppedError(
            f"others wrote all answers of step {step}, and rollout.thinking = {config.rollout.thinking!r} leaves "
            "nothing of them to train on. Set rollout.thinking = 'keep', or give answers with a thinking block and a text",
            exit_code=1,
        )
    parts.rest_teachers()
    batch, columns = others.join(None), others.columns({})
    clock.begin("update", len(batch) * config.optim.ppo_epochs)
    update = parts.learner.update(batch, columns, seed=config.seed, step=step, forward=forward)
    clock.end()
    if update.skipped and parts.ranks.is_main:
        dump_skipped(run.path, batch, columns, step)
    metrics = metrics_without_rollouts(update) | mix_metrics(given, others, 0, update)
    return StepStats(step, update.loss, update.grad_norm, update.tokens, 0, update.skipped > 0, clock.laps, metrics)


def save(config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, state: TrainingState) -> None:
    """Write a checkpoint. All ranks call it: each may have a part of the optimizer's state."""
    parts.activity.stage("saving a checkpoint")
    optimizer = parts.learner.optimizer_state()
    if parts.ranks.is_main:
        store.save(
            state.step,
            model=parts.student,
            tokenizer=parts.tokenizer,
            optimizer=optimizer,
            state=asdict(state),
            card=model_card(config, run, state.step),
            average=parts.learner.average,
        )
        keep_best(store, state.best_step)
    parts.activity.stage("")


def _evaluate(config: Config, parts: Parts, run: RunDirectory, tracker: Tracker, state: TrainingState) -> bool:
    """Evaluate what is due after this step and not there yet; whether the checkpoint is the best so far."""
    if not is_due(config, state.step):
        return False
    accuracies = evaluate_tasks(config, parts, run, tracker, state.step)
    return state.step > 0 and state.note(state.step, accuracies.get(config.checkpoint.best or ""))

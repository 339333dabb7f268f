"""The loop. It does not know which method it runs: that is `algo.signal`, chosen by the settings."""

from __future__ import annotations

import signal as os_signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from iwopd import algo
from iwopd.algo.signal import TrainingSignal, training_signal
from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.lm import Sequences
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.router import local_scorers
from iwopd.train.assembly import Parts
from iwopd.train.card import model_card
from iwopd.train.checkpoint import CheckpointStore
from iwopd.train.evaluation import evaluate_tasks, keep_best
from iwopd.train.metrics import step_metrics, training_progress
from iwopd.train.mismatch import check_engine, mismatch_metrics
from iwopd.train.pipeline import Written, write_step
from iwopd.train.teachers import overlap
from iwopd.train.tracking import Tracker
from iwopd.types import ScoredRollout, StepStats, TokenBatch

MOST_SKIPPED = 3
"""Steps in a row whose update may be skipped before the run gives up."""


class TrainingStoppedError(UserError, RuntimeError):
    """The run ended before its last step; `exit_code` is what the process should return."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Progress:
    """What a checkpoint must bring back besides weights, optimizer and random states."""

    step: int = 0
    skipped_in_a_row: int = 0
    skipped: int = 0
    best: float | None = None
    """Highest accuracy of the task that `checkpoint.best` names, and the step it was reached at."""
    best_step: int | None = None

    def note(self, step: int, accuracy: float | None) -> bool:
        """Whether this is the best yet (and if it is, remember it)."""
        if accuracy is None or (self.best is not None and accuracy <= self.best):
            return False
        self.best, self.best_step = accuracy, step
        return True


def train(
    config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, tracker: Tracker, done: Progress
) -> Progress:
    """Train from the step after `done.step` to the last one."""
    with _interrupts() as interrupted:
        if done.step < config.steps:
            _check_heads(config, parts, tracker, done.step + 1)
            check_engine(config, parts, done.step + 1)
        if done.step == 0:
            evaluate_tasks(config, parts, run, tracker, 0)
        for step in range(done.step + 1, config.steps + 1):
            clock = Clock()
            prompts = parts.order.batch(step)
            written = write_step(
                prompts,
                parts.sampler,
                parts.teacher_scorer,
                parts.ranks,
                seed=config.seed,
                step=step,
                samples=config.rollout.samples,
                overlap=overlap(config),
            )
            rollouts = written.rollouts
            clock.lap("rollout")
            scored, floored = _score(config, parts, written)
            batch = TokenBatch.collate(scored, pad_id=0, correct_rollouts=config.rollout.engine != "local")
            mismatch = mismatch_metrics(config, batch, step)
            clock.lap("teacher")
            signal = _signal(config, batch, scored, training_progress(step, config.steps))
            clock.lap("signal")
            update = parts.learner.update(batch, signal, seed=config.seed, step=step)
            clock.lap("update")
            skipped = update.skipped > 0
            done.step, done.skipped = step, done.skipped + update.skipped
            done.skipped_in_a_row = done.skipped_in_a_row + 1 if skipped else 0
            if skipped and parts.ranks.is_main:
                _dump(run, batch, signal, step)
            metrics = step_metrics(batch, signal, rollouts, update, floored) | mismatch
            stats = StepStats(step, update.loss, update.grad_norm, update.tokens, len(rollouts), skipped, clock.laps, metrics)
            tracker.step(stats)
            better = False
            if step % config.eval.every == 0 or step == config.steps:
                better = done.note(step, evaluate_tasks(config, parts, run, tracker, step).get(config.checkpoint.best or ""))
            if done.skipped_in_a_row >= MOST_SKIPPED:
                raise TrainingStoppedError(
                    f"loss or gradient was not finite in {MOST_SKIPPED} steps in a row, up to step {step}; no such update "
                    f"touched the weights, and the batches lie in {run.path}. Lower optim.lr, or look at the dumps",
                    exit_code=1,
                )
            stop = max(parts.ranks.gather(interrupted[0] if interrupted else 0))  # all ranks stop after the same step
            if step % config.checkpoint.every == 0 or step == config.steps or stop or better:
                save(config, parts, run, store, done)
            if stop:
                name = os_signal.Signals(stop).name
                raise TrainingStoppedError(f"stopped by {name} after step {step}; continue with --resume", 128 + stop)
    return done


def save(config: Config, parts: Parts, run: RunDirectory, store: CheckpointStore, done: Progress) -> None:
    if parts.ranks.is_main:
        store.save(
            done.step,
            model=parts.student,
            tokenizer=parts.tokenizer,
            optimizer=parts.learner.optimizer,
            state=asdict(done),
            card=model_card(config, run, done.step),
        )
        keep_best(store, done.best_step)


def _score(config: Config, parts: Parts, written: Written) -> tuple[list[ScoredRollout], int]:
    """Old, teacher and reference log-probs; impossible tokens floored and counted."""

    def own(mine: Any) -> list[tuple[Tensor, Tensor | None]]:
        old = parts.learner.old_logprobs(mine) or parts.student_scorer.score(mine)
        reference = parts.reference_scorer.score(mine) if parts.reference_scorer else [None] * len(mine)
        return list(zip(old, reference, strict=True))

    rollouts = written.rollouts
    kept = [rollout for rollout in rollouts if config.rollout.truncated != "drop" or rollout.stop_reason == "eos"]
    if config.rollout.truncated != "keep" and all(rollout.stop_reason == "length" for rollout in rollouts):
        raise TrainingStoppedError(
            f"every rollout of the step was cut off at max_tokens and rollout.truncated is {config.rollout.truncated!r}: "
            "nothing is left to train on. Raise rollout.max_tokens, or keep them",
            exit_code=1,
        )
    pairs = parts.ranks.share(kept, own)  # the teacher may still be at work
    scored, count = [], 0
    for rollout, (lp_0, lp_r), lp_t in zip(kept, pairs, written.teacher_logprobs(kept), strict=True):
        everywhere = torch.ones(len(rollout), dtype=torch.bool)
        floored = algo.floor_logprobs(lp_t, everywhere)
        lp_r = None if lp_r is None else algo.floor_logprobs(lp_r, everywhere, name="reference_logprobs").logprobs
        scored.append(ScoredRollout(rollout, lp_0, floored.logprobs, lp_r))
        count += floored.floored
    return scored, count


def _signal(config: Config, batch: TokenBatch, scored: list[ScoredRollout], progress: float) -> TrainingSignal:
    mask = batch.mask
    if config.rollout.truncated == "mask":
        whole = torch.tensor([item.rollout.stop_reason == "eos" for item in scored])
        mask = mask & whole[:, None]
    return training_signal(
        batch.teacher_logprobs,
        batch.old_logprobs,
        mask,
        progress=progress,
        reference_logprobs=batch.reference_logprobs,
        **config.method.signal,
    )


def _check_heads(config: Config, parts: Parts, tracker: Tracker, step: int) -> None:
    """Compare every model's fused head with its own logits, on real rollouts and before anything is scored."""
    rollouts = parts.sampler.sample(parts.order.batch(step)[:2], seed=config.seed, step=step)
    prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in rollouts]
    sequences = Sequences.build(prompts, [rollout.response_ids for rollout in rollouts]).to(parts.device)
    users = {"student": [parts.learner.lm, parts.student_scorer.lm]}
    for kind, scorer in (("teacher", parts.teacher_scorer), ("reference", parts.reference_scorer)):
        users.update({name: [local.lm] for name, local in local_scorers(scorer, kind)})
    for name, models in users.items():
        difference = max(lm.check_head(sequences) for lm in models)
        if not models[0].fused:
            tracker.say(
                f"the {name}'s own logits differ from its output matrix by {difference:.3g} (a soft cap or a scale?): "
                "using its own logits, which takes more memory"
            )
        elif models[0].packing_obstacle is not None:
            tracker.say(f"the {name}'s answers are padded to equal lengths, which takes longer: {models[0].packing_obstacle}")
    if config.method.entropy_coef and not parts.learner.lm.fused:
        raise TrainingStoppedError("the entropy bonus needs the fused head, which this student does not fit", exit_code=2)


def _dump(run: RunDirectory, batch: TokenBatch, signal: TrainingSignal, step: int) -> None:
    """Keep the batch of a skipped update, for whoever wants to know why."""
    tensors = {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": batch.prompt_mask,
        "response_ids": batch.response_ids,
        "mask": batch.mask,
        "old_logprobs": batch.old_logprobs,
        "teacher_logprobs": batch.teacher_logprobs,
        "advantages": signal.advantages,
        "weights": signal.weights,
    }
    save_file(
        {name: values.contiguous() for name, values in tensors.items()}, run.path / f"skipped-step-{step:06d}.safetensors"
    )


class Clock:
    """Wall time by stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The signals received: the first asks for a stop after the step, a second Ctrl-C a second later stops at once."""
    received: list[int] = []
    first = [0.0]

    def note(number: int, frame: FrameType | None) -> None:
        # Launchers may pass one Ctrl-C on twice, so a second one counts only after a moment.
        if received and number == os_signal.SIGINT and time.monotonic() - first[0] > 1.0:
            raise KeyboardInterrupt
        if not received:
            first[0] = time.monotonic()
        received.append(number)

    numbers = (os_signal.SIGTERM, os_signal.SIGINT)
    before = {number: os_signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            os_signal.signal(number, handler)

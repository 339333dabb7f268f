"""`iwopd train --engine verl`: start a verl job and fill a normal run directory from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from signal import Signals

from iwopd.cluster.verl.checks import check_installed, check_other_teachers, check_settings, check_tokenizer, examine
from iwopd.cluster.verl.convert import adopt, check_ranks, full_disk, newest
from iwopd.cluster.verl.evaluation import Validations, evaluated_tasks
from iwopd.cluster.verl.job import LOCAL, RUNNING, VerlJob, check_size, command, ray_address, shown
from iwopd.cluster.verl.metrics import MetricsFile, noise_warning, reward_warning, step_stats
from iwopd.cluster.verl.pools import pools
from iwopd.cluster.verl.prompts import load_order, write_prompts
from iwopd.cluster.verl.shared import check_shared
from iwopd.cluster.verl.stops import Received, StopAskedError, StopFile, received_signals
from iwopd.cluster.verl.translate import Places, evaluates, model_paths, places
from iwopd.config import Config
from iwopd.filesystem import write_atomic
from iwopd.runs.directory import RunDirectory
from iwopd.trackers import check_trackers
from iwopd.train.assembly import check_support
from iwopd.train.doctor import refuse
from iwopd.train.examples import keep_examples
from iwopd.train.loading import open_world
from iwopd.train.progress import PretrainingListener
from iwopd.train.state import TrainingStoppedError
from iwopd.train.tracking import Tracker

POLL = 0.5
"""Seconds between two checks of the job."""


def dry_run(config: Config, folder: Path, *, resume: bool = False, address: str | None = None) -> str:
    """The command that would be run. Needs no network, no models, neither verl nor Ray, and writes nothing."""
    check_settings(config)
    where = places(config, folder, _launches(folder) + 1)
    found = newest(where.checkpoints) if resume else None
    asked = ray_address(address)
    address = RUNNING if asked == LOCAL and config.cluster.nodes > 1 else asked
    return shown(*command(config, where, address, found[1] if found else None))


def dry_run_notes(config: Config, folder: Path, address: str | None = None) -> Iterator[str]:
    """What the command of a dry run takes for granted."""
    if ray_address(address) == LOCAL and config.cluster.nodes > 1:
        yield (
            f"{config.cluster.nodes} machines need a Ray cluster, and none is named: the command asks for a running one "
            f"(RAY_ADDRESS={RUNNING}). Start it (docs/cluster.md), and give --ray-address {RUNNING} without --dry-run"
        )
    where = places(config, folder, _launches(folder) + 1)
    if missing := [file.name for file in (where.train_file, where.val_file) if not file.exists()]:
        yield f"{where.folder} has no {' and '.join(missing)} yet: `iwopd train` without --dry-run writes them and starts this"


def run_on_verl(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    doctor: bool = True,
    address: str | None = None,
    progress: PretrainingListener | None = None,
) -> int:
    """Train in `folder` on a Ray cluster, and wait for the end; returns the last step."""
    check_settings(config)
    check_installed()
    address = ray_address(address)
    run = RunDirectory(folder)
    note = ""
    if resume:
        run.check_resumable("verl")
    else:
        note = run.check_free()
    check_trackers(config.tracking.trackers)
    findings = list(examine(config, folder)) if doctor else []
    refuse(findings)
    messages = [*filter(None, [note]), *(finding.text() for finding in findings if finding.level == "warn")]
    check_size(config, address)
    open_world(config, progress)  # verl finds the models there
    order, tokenizer = load_order(config, messages.append)
    check_support(config, len(tokenizer))
    check_tokenizer(config, tokenizer, order.prompts)
    if doctor:
        check_other_teachers(config, tokenizer)
    tasks = evaluated_tasks(config, tokenizer)
    if address != LOCAL:
        check_shared(address, [folder.absolute(), places(config, folder).checkpoints], model_paths(config))
    with run.owned(messages.append):
        where = places(config, folder, _launches(folder) + 1)
        data = order.fingerprint()
        done = _prepare(config, run, data, where, messages.append, resume=resume, allow_changes=allow_changes)
        last = done[0] if done else -1
        with closing(Tracker(config, run, after=last if resume else None)) as tracker:
            for message in messages:
                tracker.say(message)
            if done and done[0] >= config.steps:
                tracker.say(f"{folder} has all its {config.steps} steps")
                return done[0]
            write_prompts(config, order, tokenizer, where, tasks)
            keep_examples(folder, config, tokenizer, order.prompts)
            owed = done is not None and _evaluation_is_owed(config, run, done[0])
            arguments, variables = command(config, where, address, done[1] if done else None, evaluate_first=owed)
            write_atomic(where.folder / "command.sh", shown(arguments, variables) + "\n")
            log = where.folder / where.metrics.name.replace("metrics", "log").replace(".jsonl", ".txt")
            if done:
                tracker.say(f"resuming {folder} after step {done[0]}")
            tracker.say(f"starting verl ({'a Ray of its own' if address == LOCAL else f'Ray at {address}'}); its output: {log}")
            StopFile(where.metrics).clear()
            with received_signals() as received:
                answers = Validations(tasks, where.validation)
                job = VerlJob(arguments, variables, log, run.shared_lock)
                return _follow(config, run, where, job, tracker, answers, received, max(0, last))


def _prepare(
    config: Config,
    run: RunDirectory,
    data: str,
    where: Places,
    notify: Callable[[str], None],
    *,
    resume: bool,
    allow_changes: bool,
) -> tuple[int, Path] | None:
    """Create or reopen the run directory; returns the checkpoint to resume from."""
    if not resume:
        run.create(config, data, engine="verl")
        return None
    run.check_resume(config, data, allow_changes=allow_changes)
    found = newest(where.checkpoints)
    if found is not None:
        check_ranks(found[1], pools(config).student.gpus)
        adopt(config, run, where.checkpoints)
    run.rewind(found[0] if found else -1, notify)
    return found


def _evaluation_is_owed(config: Config, run: RunDirectory, step: int) -> bool:
    """Whether the job ended between the checkpoint of this step and its evaluation."""
    due = evaluates(config) and step % config.eval.every == 0
    return due and all(record["step"] != step for record in run.read("evals.jsonl"))


def _follow(
    config: Config,
    run: RunDirectory,
    where: Places,
    job: VerlJob,
    tracker: Tracker,
    answers: Validations,
    received: Received,
    done: int,
) -> int:
    """Follow the job until it ends or must be ended; record its metrics, evaluations and checkpoints."""
    metrics, last = MetricsFile(where.metrics), time.monotonic()
    stop = StopFile(where.metrics)
    step, saved, warnings = done, done, [noise_warning, reward_warning]
    try:
        while True:
            code = job.exit_code  # before reading, so that its last lines are read
            for step, numbers in metrics.new():
                stats = step_stats(config, step, numbers)
                tracker.step(stats)
                for find in list(warnings):
                    if (warning := find(config, stats)) is not None:
                        tracker.say(warning)
                        warnings.remove(find)  # each is said once
                last = time.monotonic()
            answers.look(step)
            for evaluation in answers.finished(wait=code is not None):
                tracker.evaluation(evaluation, 0.0)
            saved = max([saved, *adopt(config, run, where.checkpoints)])
            if code is not None:
                for number in answers.missing():
                    tracker.say(f"step {number}: answers are missing in {where.validation}, so its evaluation is left out")
                break
            if received.first and (received.again or not stop.training_began):
                job.end()
                saved = max([saved, *adopt(config, run, where.checkpoints)])
                raise _stopped(received.first, step, saved)
            if received.first and not stop.asked():
                stop.ask(received.first.name)
                tracker.say(
                    f"{received.first.name}: the job saves its newest finished step and ends; a second signal ends it at once"
                )
            if time.monotonic() - last > config.cluster.patience:
                raise TrainingStoppedError(
                    f"no step was finished in {config.cluster.patience:g} s (cluster.patience) after step {step}, so the job "
                    f"was ended; its output is in {job.log}. {_resume(saved)}",
                    1,
                )
            time.sleep(POLL)
    finally:
        job.end()
        answers.close()
    if code == StopAskedError.exit_code:
        raise _stopped(received.first or Signals.SIGTERM, step, saved)
    if code or step < config.steps:
        why = (job.last_words() or f"exit code {code}") + full_disk(where.checkpoints)
        message = f"verl's job ended after step {step}: {why}\nAll of it: {job.log}. {_resume(saved)}"
        raise TrainingStoppedError(message, 2 if code == 2 else 1)  # 2: the user can correct it
    return step


def _stopped(number: Signals, step: int, saved: int) -> TrainingStoppedError:
    return TrainingStoppedError(f"stopped by {number.name} after step {step}. {_resume(saved)}", 128 + number)


def _resume(saved: int) -> str:
    if not saved:
        return "No checkpoint was saved yet: start again"
    return f"The newest checkpoint is of step {saved}: continue with --resume"


def _launches(folder: Path) -> int:
    return len(list((folder / "verl").glob("log-*.txt")))

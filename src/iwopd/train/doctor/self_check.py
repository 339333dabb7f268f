"""`iwopd doctor --self-check`: the real pipeline on questions whose answers are known, so that no fault stays silent.

    self gap      the student teaches itself, behind the recipe's kind of scorer: the gap must be 0 but for the noise floor
    self repeat   who scores says the same when it is asked again (`answers`)
    self spread   it does not find every id equally likely
    self shift    its scores belong to their tokens
    self update   loss, gradient and denominator of the trainer are those of a plain computation over the same tokens
    self loss     a server's scores give the loss that a copy of the same model gives here

It trains on nothing: the update runs with a learning rate of 0, and the optimizer's state is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from iwopd.algo.noise import NEGLIGIBLE
from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.models import load_configs
from iwopd.stages import StageListener
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.foreign import ForeignScorer
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer
from iwopd.teacher.serving import TeacherServer
from iwopd.teacher.serving_model import ServingModel
from iwopd.train.assembly import check_heads
from iwopd.train.doctor.answers import REMEDY, examine_answers
from iwopd.train.doctor.echo import TOLERANCE, TOLERANCE_HALF
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.doctor.noise import measure_noise
from iwopd.train.doctor.plain_update import check_update, plain_loss
from iwopd.train.doctor.resources import gigabytes, main_memory
from iwopd.train.loading import load_teacher, planned_world, source_of
from iwopd.train.memory import ModelShape
from iwopd.train.memory.run import DTYPE_BYTES
from iwopd.train.parts import Parts
from iwopd.train.pipeline import Written
from iwopd.train.scoring import ScoredStep, loss_columns, score_step
from iwopd.types import Rollout

ROLLOUTS, TOKENS = 6, 64
"""Answers that are written, and tokens of each: all checks look at the same ones."""
SECONDS = 900.0
"""After so long no further check begins."""
MEMORY_SHARE = 0.5
"""Of free memory that a copy of a served teacher may take here."""
FAULT = "this is a fault of iwopd or of a plug-in (an engine, an objective): report it with this line, and do not train"


def examine_pipeline(
    config: Config, parts: Parts, listener: StageListener | None = None, *, step: int = 1
) -> Iterator[Finding]:
    """One block of findings; the parts of the run are as before when it has ended."""
    listener, began = listener or StageListener(), time.monotonic()
    rollouts = known_answers(config, parts, step)
    tokens = sum(map(len, rollouts))
    old = parts.student_scorer.score(rollouts)
    paths = list(parts.teacher_scorer.paths("teacher"))
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("self gap", lambda: _check_gap(config, parts, rollouts, step)),
        *(("self repeat", partial(examine_answers, path, rollouts, old, len(parts.tokenizer))) for path in paths),
        ("self update", lambda: check_update(config, parts, _score(config, parts, rollouts, step))),
        ("self loss", lambda: _check_losses(config, parts, rollouts, step)),
    ]
    listener.stage("self-check", len(checks))
    for name, check in checks:
        if time.monotonic() - began > SECONDS:
            words = f"left out: the checks before it took more than {SECONDS:.0f} s"
            yield warning(name, words, "use a faster teacher or a smaller student to run all checks")
            continue
        try:
            yield from check()
        except TeacherError as error:
            yield failure(name, str(error), REMEDY)
        listener.advance(1, tokens)


def known_answers(config: Config, parts: Parts, step: int) -> list[Rollout]:
    """A few answers of the student, cut short: what is cut off counts as an answer that reached its horizon."""
    samples = config.rollout.samples
    prompts = parts.order.batch(step)[: max(2, ROLLOUTS // samples)]
    parts.before_writing()
    limits = [min(TOKENS, parts.max_response)] * len(prompts)
    written = parts.ranks.together(
        lambda: parts.sampler.sample(prompts, seed=config.seed, step=step, samples=samples, max_tokens=limits)
    )
    return [replace(one, stop_reason="horizon") if one.stop_reason == "length" else one for one in written]


def _score(config: Config, parts: Parts, rollouts: Sequence[Rollout], step: int) -> ScoredStep:
    """As a step of the run scores its rollouts."""
    checking = None
    if parts.rewards is not None:
        checking = parts.rewards.begin()
        for place, rollout in enumerate(rollouts):
            checking.add(place, rollout)
        checking.close()
    samples = config.rollout.samples
    written = Written(list(rollouts), parts.teacher_scorer, parts.ranks, None, samples, parts.teacher_wanted, checking)
    scored = score_step(config, parts, written, step)
    parts.rest_teachers()
    return scored


def _check_gap(config: Config, parts: Parts, rollouts: Sequence[Rollout], step: int) -> Iterator[Finding]:
    """The pipeline between the student and itself."""
    with _twin(config, parts, rollouts) as (twin, how):
        itself = replace(parts, teacher_scorer=twin)
        evidence = _score(config, itself, rollouts, step).evidence
        gap = float(evidence.gap[evidence.mask].double().abs().mean())
        _, _, floor = measure_noise(config, itself, rollouts[:3])
    half = parts.student_scorer.half or twin.local("twin").get("twin", parts.student_scorer).lm.half
    # The floor is measured over the path that is on trial: what no rounding explains is no floor.
    limit = min(max(2 * floor.total, NEGLIGIBLE), TOLERANCE_HALF if half else TOLERANCE)
    words = f"the student taught by itself ({how}): mean |gap| {gap:.2g} nats a token, noise floor {floor.total:.2g}"
    if gap <= limit:
        yield passed("self gap", words)
    else:
        yield failure("self gap", f"{words}. It should be 0: scores and tokens do not belong together on their way", FAULT)


@contextmanager
def _twin(config: Config, parts: Parts, rollouts: Sequence[Rollout]) -> Iterator[tuple[Scorer, str]]:
    """The student's own weights behind the recipe's kind of scorer, without another copy of them; it sees the same prompts."""
    if not config.teacher.urls:
        options: dict[str, Any] = {"temperature": config.rollout.temperature, "head_precision": config.head_products}
        local = LocalScorer(parts.student, vocab_size=len(parts.tokenizer), **options)
        check_heads({"twin": local}, parts.order.prompts)
        yield local, "a local scorer"
        return
    longest = max(len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts) + 1
    with TeacherServer("student", host="127.0.0.1", port=0, token=None) as server:
        server.model = ServingModel(parts.student, vocab_size=len(parts.tokenizer), max_length=longest, cache_bytes=0)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        dialect = "iwopd" if config.teacher.dialect == "sglang" else config.teacher.dialect
        given = {"urls": [server.url], "name": "student", "dialect": dialect, "api_key_env": None}
        try:
            scorer = ServerScorer(config.teacher.model_copy(update=given))
            scorer.vocab_size = len(parts.tokenizer)
            yield scorer, f"a server of it on this machine, dialect {dialect}"
        finally:
            server.shutdown()
            thread.join()


def _check_losses(config: Config, parts: Parts, rollouts: Sequence[Rollout], step: int) -> Iterator[Finding]:
    """The loss from a server's scores against the loss from a copy of its model in this process."""
    if not config.teacher.urls:
        return
    try:
        copy, why = _copy_of_teacher(config, parts)
    except UserError as error:
        copy, why = None, str(error).strip().splitlines()[0]
    if copy is None:
        yield passed("self loss", f"not compared with a copy of the teacher here: {why}")
        return
    mine = [rollout for rollout in rollouts if rollout.prompt.teacher is None]
    if not mine:
        yield passed("self loss", "not compared: these prompts go to other teachers")
        return
    losses = [_loss(config, replace(parts, teacher_scorer=scorer), mine, step) for scorer in (parts.teacher_scorer, copy)]
    (served, scale), (here, _) = losses
    half = (
        any(one.lm.half for one in copy.local("copy").values())
        or parts.student_scorer.half
        or config.models.teacher_dtype not in (None, "float32")
    )
    limit = TOLERANCE_HALF if half else TOLERANCE
    words = f"from the server's scores {served:.6g}, from those of {config.models.teacher or 'the teacher'} here {here:.6g}"
    if abs(served - here) <= limit * max(1.0, scale):
        yield passed("self loss", f"the loss is the same ({words})")
    else:
        why = "the server has another model, another temperature, or leaves out other ids"
        yield failure("self loss", f"the loss differs: {words}: {why}", REMEDY)


def _copy_of_teacher(config: Config, parts: Parts) -> tuple[Scorer | None, str]:
    """On the CPU, with the prompts and ids that the teacher sees, if its files are here and there is room; else why not."""
    source = source_of(config, "teacher", planned_world(config))
    if source is None or not source.is_local:
        return None, "its files are not on this machine (models.teacher may name a folder)"
    shape = ModelShape.of(load_configs(source, trust_remote_code=config.models.trust_remote_code)[0])
    size = shape.count.total * DTYPE_BYTES[config.models.teacher_dtype or config.models.dtype]
    free = main_memory()
    if free is not None and size > MEMORY_SHARE * free:
        return None, f"it would take {gigabytes(size)} and {gigabytes(free)} are free"
    model = load_teacher(config, source, torch.device("cpu"))
    first = parts.teacher_scorer
    first = first.teachers[None] if isinstance(first, RoutedScorer) else first
    ids = first.reader.ids if isinstance(first, ForeignScorer) else len(parts.tokenizer)
    scorer: Scorer = LocalScorer(model, vocab_size=ids, head_precision=config.head_products)
    if isinstance(first, ForeignScorer):
        scorer = ForeignScorer(scorer, first.reader)
    elif isinstance(first, PromptedScorer):
        scorer = PromptedScorer(scorer, first.change)
    check_heads({"copy": scorer}, parts.order.prompts)
    return scorer, ""


def _loss(config: Config, parts: Parts, rollouts: Sequence[Rollout], step: int) -> tuple[float, float]:
    """Of these rollouts under the student as it is, and the mean size of what it is the mean of."""
    scored = _score(config, parts, rollouts, step)
    signal = parts.objective.signal(scored.evidence)
    columns = loss_columns(parts.objective, scored.batch, scored.evidence, signal)
    found = plain_loss(parts, scored.batch, columns, int(signal.supervised.sum()), gradient=False)
    return found.loss, found.scale

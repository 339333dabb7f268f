"""From settings to the teacher: a local model, servers, or several of both behind a router, with prompts of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from iwopd.config import Config, ConfigError, TeacherSource
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer
from iwopd.train.chats import teacher_view
from iwopd.train.teacher_cache import cached
from iwopd.types import Prompt

LocalTeacher = Callable[[str | None], Scorer]
"""Loads the model of a local teacher; None is the default one."""


def build_teacher(config: Config, tokenizer: Any, prompts: Sequence[Prompt], max_tokens: int, local: LocalTeacher) -> Scorer:
    """The teacher of a run, its servers tried out on real prompts."""
    sources: dict[str | None, TeacherSource] = {None: config.teacher}
    sources.update(config.teacher.others)
    router = RoutedScorer({name: _scorer(config, name, source, tokenizer, local) for name, source in sources.items()})
    router.try_out(prompts, vocab_size=len(tokenizer), max_tokens=max_tokens, wanted=config.method.made.asks.teacher)
    _check_difference(config, router.teachers[None], prompts)
    return router if config.teacher.others else router.teachers[None]


def scores_early(config: Config) -> bool:
    """Whether the teacher scores finished answers while others are being written."""
    if config.rollout.overlap is not None:
        return config.rollout.overlap
    return config.teacher.has_servers and config.teacher.source not in ("base", "live")  # which the student writes with


def has_local_teacher(config: Config) -> bool:
    """Whether a teacher is loaded here: the first one, or one of the others."""
    first = not config.teacher.urls and not config.teacher.is_student
    return first or any(other.model is not None for other in config.teacher.others.values())


def check_teacher_device(config: Config, ranks: int) -> None:
    """Refuse a device that all `ranks` processes of a machine would load their own copy of the teacher onto."""
    if config.keeps_average and ranks > 1 and ":" in (config.ema.device or ""):
        raise ConfigError(
            f"ema.device = {config.ema.device!r} with {ranks} processes on a machine: each would keep its average there. Leave "
            "it empty (each has one beside its student), or set 'cpu' (each has one in main memory)"
        )
    device = config.models.teacher_device
    if ranks == 1 or device is None or not has_local_teacher(config) or (device != "auto" and ":" not in device):
        return
    where = "spread over all GPUs" if device == "auto" else f"onto {device}"
    raise ConfigError(
        f"models.teacher_device = {device!r} with {ranks} processes on a machine: each would load a copy of the teacher "
        f"{where}. Leave it empty (each process has a copy beside its student), set 'cpu' (each has one in main memory), or "
        "put the teacher behind a server (teacher.urls), which all of them ask"
    )


def _check_difference(config: Config, teacher: Scorer, prompts: Sequence[Prompt]) -> None:
    """Refuse the present student as its own teacher if it sees nothing that the student does not see."""
    if config.teacher.source != "live" or not isinstance(teacher, PromptedScorer):
        return
    mine = [prompt for prompt in prompts if prompt.teacher is None]
    if mine and all(teacher.seen(prompt).token_ids == prompt.token_ids for prompt in mine):
        raise ConfigError(
            "teacher.source = 'live' has the student's weights, and teacher.system and teacher.user make the student's own "
            f"prompt of all {len(mine)}, so the gap is 0 everywhere: show it more than the student sees, e.g. {{answer}}"
        )


def _scorer(config: Config, name: str | None, source: TeacherSource, tokenizer: Any, local: LocalTeacher) -> Scorer:
    scorer: Scorer
    if source.urls:
        model = config.models.teacher if name is None else None
        scorer = ServerScorer(source, model=model, name=name or "teacher", notify=_notify(config))
    else:
        scorer = local(getattr(source, "model", None))
    if config.teacher.cache is not None:
        scorer = cached(config, scorer, source, None if source.urls else getattr(source, "model", None), len(tokenizer))
    view = teacher_view(config, source, tokenizer)
    return scorer if view is None else PromptedScorer(scorer, view)


def _notify(config: Config) -> Callable[[str], None]:
    """Straight to the terminal: waiting for a server may begin before the tracker exists."""
    return (lambda _: None) if config.tracking.console == "off" else partial(print, file=sys.stderr, flush=True)

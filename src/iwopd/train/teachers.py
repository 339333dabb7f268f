"""From settings to the teacher: a local model, servers, or several of both behind a router, with prompts of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from iwopd.config import Config, ConfigError, TeacherSource
from iwopd.config.own_teacher_checks import otherwise_moved
from iwopd.data.teacher_view import PromptTemplate, foreign_prompt
from iwopd.devices import check_device
from iwopd.model_facts import context_length
from iwopd.teacher.foreign import ForeignScorer, Reader
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer
from iwopd.train.chats import student_chat, teacher_chat, teacher_view
from iwopd.train.teacher_cache import cached
from iwopd.train.tokenizers import TEACHER, sections
from iwopd.types import Prompt
from iwopd.vocabulary import answer_end

LocalTeacher = Callable[[str | None, Any], Scorer]
"""Loads the model of a local teacher, None is the default one; and the tokenizer whose ids it will be given."""


def build_teacher(
    config: Config,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_tokens: int,
    local: LocalTeacher,
    foreign: Mapping[str, Any] | None = None,
) -> Scorer:
    """The teacher of a run, its servers tried out on real prompts; `foreign`: tokenizers that differ, by section."""
    found: dict[str | None, Scorer] = {}
    for section, source in sections(config).items():
        name = None if section == TEACHER else section.removeprefix(f"{TEACHER}.others.")
        found[name] = _scorer(config, name, source, tokenizer, local, (foreign or {}).get(section))
    router = RoutedScorer(found)
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


def check_named_devices(config: Config) -> None:
    """Refuse a device of the teacher's, or of an average, that is not here."""
    for name, given in (("ema.device", config.ema.device), ("models.teacher_device", config.models.teacher_device)):
        if given not in (None, "auto"):
            check_device(str(given), name)


def check_teacher_device(config: Config, ranks: int) -> None:
    """Refuse a device that all `ranks` processes of a machine would load their own teacher onto."""
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
    """Refuse the student as its own teacher if it sees nothing that the student does not see, and nothing else moves it."""
    source = config.teacher.source
    if source == "model" or not isinstance(teacher, PromptedScorer) or (source != "live" and otherwise_moved(config)):
        return
    mine = [prompt for prompt in prompts if prompt.teacher is None]
    if mine and all(teacher.seen(prompt).token_ids == prompt.token_ids for prompt in mine):
        raise ConfigError(
            f"teacher.source = {source!r} has the student's weights, and what [teacher] says makes the student's own prompt of "
            f"all {len(mine)}, so the gap is 0: show it more than the student sees, e.g. teacher.user with {{answer}}"
        )


def foreign_reader(config: Config, source: TeacherSource, tokenizer: Any, other: Any, section: str = TEACHER) -> Reader:
    """Who reads the student's answers to a teacher with the tokenizer `other`, as the settings of its section say."""
    chat = teacher_chat(config, source, other, foreign=True)
    see = foreign_prompt(chat, PromptTemplate(source.system, source.user))
    leads = (student_chat(config, tokenizer).lead(), chat.lead())
    return Reader(tokenizer, other, see, leads=leads, end=answer_end(other, chat.template, chat.kwargs), name=section)


def _scorer(
    config: Config, name: str | None, source: TeacherSource, tokenizer: Any, local: LocalTeacher, other: Any = None
) -> Scorer:
    """`other`: the teacher's own tokenizer, if its ids mean something else than the student's."""
    scorer: Scorer
    if source.urls:
        model = config.models.teacher if name is None else None
        scorer = ServerScorer(source, model=model, name=name or "teacher", notify=_notify(config))
    else:
        scorer = local(getattr(source, "model", None), tokenizer if other is None else other)
    if config.teacher.cache is not None:
        ids = len(tokenizer if other is None else other)
        scorer = cached(config, scorer, source, None if source.urls else getattr(source, "model", None), ids)
    if other is not None:
        reader = foreign_reader(config, source, tokenizer, other, TEACHER if name is None else f"{TEACHER}.others.{name}")
        rooms = [context_length(one.lm.model.config) for one in scorer.local(TEACHER).values()]
        reader.room = min((room for room in rooms if room is not None), default=None)
        return ForeignScorer(scorer, reader)
    view = teacher_view(config, source, tokenizer)
    return scorer if view is None else PromptedScorer(scorer, view)


def _notify(config: Config) -> Callable[[str], None]:
    """Straight to the terminal: waiting for a server may begin before the tracker exists."""
    if config.tracking.console == "off":
        return lambda _: None
    return lambda text: print(text, file=sys.stderr, flush=True)  # the stderr of that moment: a display may stand there

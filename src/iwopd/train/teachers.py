"""From settings to the teacher: a local model, servers, or several of both behind a router, with prompts of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from iwopd.config import Config, TeacherSource
from iwopd.data.teacher_view import PromptTemplate, teacher_prompt
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer, ServerSettings
from iwopd.types import Prompt

LocalTeacher = Callable[[str | None], Scorer]
"""Loads the model of a local teacher; None is the default one."""


def build_teacher(config: Config, tokenizer: Any, prompts: Sequence[Prompt], max_tokens: int, local: LocalTeacher) -> Scorer:
    """The teacher of a run, its servers tried out on real prompts."""
    settings = config.teacher
    sources: dict[str | None, TeacherSource] = {None: settings}
    sources.update(settings.others)
    router = RoutedScorer({name: _scorer(config, name, source, tokenizer, local) for name, source in sources.items()})
    router.try_out(prompts, vocab_size=len(tokenizer), max_tokens=max_tokens)
    return router if settings.others else router.teachers[None]


def scores_early(config: Config) -> bool:
    """Whether the teacher scores finished answers while others are being written."""
    return config.teacher.has_servers if config.rollout.overlap is None else config.rollout.overlap


def _scorer(config: Config, name: str | None, source: TeacherSource, tokenizer: Any, local: LocalTeacher) -> Scorer:
    scorer: Scorer
    if source.urls:
        known = source.name or (config.models.teacher if name is None else None)
        settings = ServerSettings(
            urls=tuple(source.urls),
            model=known,
            dialect=source.dialect,
            api_key_env=source.api_key_env,
            max_in_flight=source.max_in_flight,
            tokens_per_request=source.tokens_per_request,
            request_timeout=source.request_timeout,
            patience=source.patience,
            deadline=source.deadline,
        )
        scorer = ServerScorer(settings, name=name or "teacher", notify=_notify(config))
    else:
        scorer = local(getattr(source, "model", None))
    if source.system is None and source.user is None:
        return scorer
    return PromptedScorer(scorer, teacher_prompt(tokenizer, PromptTemplate(source.system, source.user)))


def _notify(config: Config) -> Callable[[str], None]:
    """Straight to the terminal: a server may be waited for long before, or beside, everything that is shown otherwise."""
    if config.tracking.console == "off":
        return lambda _: None
    return lambda text: print(text, file=sys.stderr, flush=True)

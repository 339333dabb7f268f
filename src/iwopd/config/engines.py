"""Settings of what writes and what scores: rollouts, engines, teachers."""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from iwopd.config.distributions import DialectName, refusal
from iwopd.config.horizon import HorizonSettings
from iwopd.config.mix import MixSettings
from iwopd.config.own_teacher import TeacherWeights
from iwopd.config.templates import TemplateKwargs, TemplateText
from iwopd.data.teacher_view import PromptTemplate
from iwopd.errors import ConfigError
from iwopd.rollout.engine import ENGINES, Engine
from iwopd.rollout.settings import ServerSettings, VllmSettings
from iwopd.section import Place, Section, Urls, Variable, validate_part


class RolloutSettings(Section):
    engine: str = Field("local", description="who writes: local (transformers), vllm, server (engine.server), or a plug-in's")
    prompts_per_step: int = Field(64, ge=1, description="prompts of one step")
    samples: int = Field(1, ge=1, description="rollouts per prompt")
    max_tokens: int | None = Field(None, ge=1, description="longest response; empty: what the world's answers need")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it, too")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1: off")
    top_k: int = Field(0, ge=0, description="keep the k likeliest ids; 0: off")
    stop_tokens: list[str] = Field([], description="tokens that end an answer, beside those of tokenizer and generation config")
    truncated: Literal["keep", "mask", "drop"] = Field("keep", description="rollouts cut off by max_tokens: trained on or not")
    thinking: Literal["keep", "mask", "only"] = Field(
        "keep", description="thinking blocks of rollouts: trained on like the rest, not at all, or alone"
    )
    horizon: HorizonSettings = Field(default_factory=HorizonSettings)
    mix: MixSettings = MixSettings()
    mismatch_limit: float | None = Field(
        None, gt=0, description="mean |difference| of engine's and trainer's log-probs that ends a run; empty: by dtype"
    )
    overlap: Place[bool | None] = Field(
        None, description="the teacher scores finished answers while others are being written; empty: if it is a server"
    )


AUTO, STUDENT = "auto", "student"


class TeacherSource(Section):
    """Where a teacher is, and what it sees."""

    urls: Place[Urls] = Field([], description="servers (replicas), e.g. ['http://gpu1:8000']; empty: a local model")
    name: str | None = Field(None, description="what the servers call the model; empty: models.teacher, or their only one")
    dialect: DialectName = Field(
        "vllm", description="vllm, sglang, or iwopd (`iwopd serve-teacher`, which also speaks vllm): docs/teachers.md"
    )
    api_key_env: Place[Variable | None] = Field(None, description="environment variable of the servers' API key; empty: none")
    max_in_flight: Place[int] = Field(16, ge=1, description="requests under way at once, for each server")
    tokens_per_request: Place[int] = Field(8192, ge=1, description="short rollouts travel together up to so many tokens")
    request_timeout: Place[float] = Field(300.0, gt=0, description="seconds for one attempt at one request")
    patience: Place[float] = Field(600.0, gt=0, description="seconds that a teacher may be away before the run saves and ends")
    deadline: Place[float] = Field(7200.0, gt=0, description="seconds for the scores of one step (or chunk of it)")
    tokenizer: str = Field(
        AUTO,
        description="auto: its model's own, by text where it differs from the student's; student: it must be the student's; "
        "or a folder or hub id with the teacher's, for servers whose model is not readable here",
    )
    system: str | None = Field(None, description="system prompt that the teacher sees instead of the student's")
    user: str | None = Field(
        None, description="user message that the teacher sees: {prompt}, {answer} and the data set's fields are filled in"
    )
    chat_template: TemplateText | None = Field(None, description="file with a Jinja template; empty: as the student's")
    chat_template_kwargs: TemplateKwargs = Field(
        default_factory=dict, description="what the teacher's chat template is given; the rest as in data.chat_template_kwargs"
    )

    @model_validator(mode="after")
    def _template_is_one(self) -> Self:
        PromptTemplate(self.system, self.user)
        return self

    @model_validator(mode="after")
    def _has_servers_to_ask(self) -> Self:
        default = type(self).model_fields["dialect"].default
        if not self.urls and self.dialect != default:
            raise ValueError(
                f"dialect is {self.dialect!r}, which says how servers are asked, but urls names none: the teacher would be "
                "loaded here. Name its servers (urls), or leave dialect out"
            )
        return self


class OtherTeacher(TeacherSource):
    model: str | None = Field(None, description="local folder or hub id, without urls")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.model) == bool(self.urls):
            raise ValueError("give either model (a local folder or hub id) or urls (servers; name says what they call it)")
        return self


class Teacher(TeacherSource):
    source: TeacherWeights = Field(
        "model",
        description="model (models.teacher or urls), or the student itself: base (adapter off), live (present weights), ema "
        "(their moving average): docs/teachers.md",
    )
    others: dict[str, OtherTeacher] = Field(
        default_factory=dict, description="further teachers by the name that a prompt's field `teacher` gives"
    )

    cache: Place[str | None] = Field(
        None, description="folder of scores that are kept for answers that recur: docs/teachers.md; empty: none are kept"
    )
    cache_gb: Place[float] = Field(10.0, gt=0, description="size of that folder in GB; the oldest scores go first")

    @property
    def is_student(self) -> bool:
        """Whether the first teacher is the student itself: no model is loaded for it."""
        return self.source != "model"

    @property
    def has_servers(self) -> bool:
        return any(source.urls for source in (self, *self.others.values()))

    def cannot_give(self, needed: Set[str]) -> str | None:
        """Why one of the servers cannot give what is needed (`algo.views.Wanted.names`), and what would work; else None."""
        sources = {"teacher": self, **{f"teacher.others.{name}": other for name, other in self.others.items()}}
        found = (refusal(needed, source.dialect, place) for place, source in sources.items() if source.urls)
        return next((words for words in found if words is not None), None)


RENAMED = {
    **{f"vllm.{name}": f"engine.vllm.{name}" for name in VllmSettings.model_fields},
    **{f"vllm.{name}": f"engine.server.{name}" for name in ServerSettings.model_fields if name != "dtype"},
    "vllm.mismatch_limit": "rollout.mismatch_limit",
}
"""Settings that have another name now."""


class Engines(Section):
    """Settings of the rollout engines, by name; an engine of another package brings a section of its own."""

    model_config = ConfigDict(extra="allow")

    vllm: VllmSettings = VllmSettings()
    server: ServerSettings = Field(default_factory=ServerSettings)

    @model_validator(mode="after")
    def _check_further_sections(self) -> Self:
        further = self.model_extra or {}
        for name, given in further.items():
            further[name] = validate_part(engine_type(name).settings_type, given, name)
        return self

    @classmethod
    def plugged_in(cls) -> dict[str, type[Section]]:
        """Of the engines of other packages."""
        found = {}
        for name in ENGINES:
            if name not in cls.model_fields:
                with suppress(ConfigError):  # a plug-in that does not load has no settings either
                    found[name] = engine_type(name).settings_type
        return found

    def of(self, name: str) -> Section:
        """Settings of the engine called `name`; its defaults if nothing was set."""
        found = getattr(self, name, None)
        return found if isinstance(found, Section) else engine_type(name).settings_type()


def engine_type(name: str) -> type[Engine]:
    """The engine of that name; a `ConfigError` says what is wrong with it."""
    try:
        return ENGINES[name]
    except (LookupError, ImportError, TypeError) as error:
        raise ConfigError(str(error)) from error

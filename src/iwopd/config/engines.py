"""Settings of what writes and what scores: rollouts, engines, teachers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from iwopd.config.section import ConfigError, Dtype, Place, Section, validate_part
from iwopd.data.teacher_view import PromptTemplate

if TYPE_CHECKING:
    from iwopd.rollout.engine import Engine


def _variable(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("must be the name of an environment variable, not the key itself")
    return name


def _server_url(url: str) -> str:
    """Scheme, host and port (and a path if a proxy needs one), without the `/v1` that some write."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValueError("a server's URL looks like http://host:8000")
    if parts.username or parts.password:
        raise ValueError("a URL must not hold a password: put the key into an environment variable and name it: api_key_env")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


Variable = Annotated[str, AfterValidator(_variable)]
Url = Annotated[str, AfterValidator(_server_url)]
Urls = Annotated[list[str], AfterValidator(lambda urls: [_server_url(url) for url in urls])]


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
    mismatch_limit: float | None = Field(
        None, gt=0, description="mean |difference| of engine's and trainer's log-probs that ends a run; empty: by dtype"
    )
    overlap: Place[bool | None] = Field(
        None, description="the teacher scores finished answers while others are being written; empty: if it is a server"
    )


class TeacherSource(Section):
    """Where a teacher is, and what it sees."""

    urls: Place[Urls] = Field([], description="servers (replicas), e.g. ['http://gpu1:8000']; empty: a local model")
    name: str | None = Field(None, description="what the servers call the model; empty: models.teacher, or their only one")
    dialect: Literal["vllm", "sglang"] = Field("vllm", description="vllm (also `iwopd serve-teacher`), or sglang")
    api_key_env: Place[Variable | None] = Field(None, description="environment variable of the servers' API key; empty: none")
    max_in_flight: Place[int] = Field(16, ge=1, description="requests under way at once, for each server")
    tokens_per_request: Place[int] = Field(8192, ge=1, description="short rollouts travel together up to so many tokens")
    request_timeout: Place[float] = Field(300.0, gt=0, description="seconds for one attempt at one request")
    patience: Place[float] = Field(600.0, gt=0, description="seconds that a teacher may be away before the run saves and ends")
    deadline: Place[float] = Field(7200.0, gt=0, description="seconds for the scores of one step (or chunk of it)")
    system: str | None = Field(None, description="system prompt that the teacher sees instead of the student's")
    user: str | None = Field(
        None, description="user message that the teacher sees: {prompt}, {answer} and the data set's fields are filled in"
    )

    @model_validator(mode="after")
    def _template_is_one(self) -> Self:
        PromptTemplate(self.system, self.user)
        return self


class OtherTeacher(TeacherSource):
    model: str | None = Field(None, description="local folder or hub id, without urls")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.model) == bool(self.urls):
            raise ValueError("give either model (a local folder or hub id) or urls (servers; name says what they call it)")
        return self


class Teacher(TeacherSource):
    others: dict[str, OtherTeacher] = Field(
        default_factory=dict, description="further teachers by the name that a prompt's field `teacher` gives"
    )

    @property
    def has_servers(self) -> bool:
        return any(source.urls for source in (self, *self.others.values()))


class VllmSettings(Section):
    """The engine `vllm`: vLLM in the training process. verl's rollouts read this section, too."""

    dtype: Dtype | None = Field(None, description="precision of vLLM's copy of the student; empty: models.dtype")
    max_model_len: int | None = Field(None, ge=2, description="longest prompt and answer; empty: what the settings allow")
    memory_share: Place[float] = Field(0.4, gt=0, le=1, description="share of a GPU's memory that vLLM may take")
    cache_gb: float | None = Field(None, gt=0, description="key/value cache in GB; empty: the rest of memory_share (CPU: 1)")
    tensor_parallel: int = Field(1, ge=1, description="GPUs of one copy of the student (above 1: never run in process)")
    eager: bool = Field(False, description="no CUDA graphs, no compilation: starts faster, runs slower")
    sleep: Place[bool] = Field(False, description="free the GPU's memory between rollouts (was never run)")


class ServerSettings(Section):
    """The engine `server`: a vLLM server on this or another machine."""

    url: Place[Url | None] = Field(None, description="the server, e.g. http://gpu1:8000")
    name: str | None = Field(None, description="what the server calls the student; empty: its only model")
    dtype: Dtype | None = Field(None, description="precision of the server's copy of the student; empty: models.dtype")
    weights_folder: Place[str | None] = Field(
        None, description="folder, for this run alone, that the server sees under the same name: new weights go through it"
    )
    api_key_env: Place[Variable | None] = Field(None, description="environment variable of the server's API key; empty: none")
    max_in_flight: Place[int] = Field(64, ge=1, description="requests under way at once")
    request_timeout: Place[float] = Field(1800.0, gt=0, description="seconds for one attempt at one request")
    patience: Place[float] = Field(120.0, gt=0, description="seconds that the server may be away before the run ends")


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
        from iwopd.rollout.engine import ENGINES

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
    from iwopd.rollout.engine import ENGINES  # late: engines import this module for their settings

    try:
        return ENGINES[name]
    except (LookupError, ImportError, TypeError) as error:
        raise ConfigError(str(error)) from error

"""One validated tree of settings. A recipe is a TOML file of it; the command line overrides it by dotted names.

Unknown keys are refused with the nearest right one. The resolved tree is saved in the run directory.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from iwopd import algo
from iwopd.data.fields import parse_filter
from iwopd.data.teacher_view import PromptTemplate
from iwopd.errors import UserError


class ConfigError(UserError, ValueError):
    """A setting that is wrong, said in words for the person who wrote it."""


OPEN_TABLES = ("method.params", "eval.data", "teacher.others")
"""Tables whose keys are the user's."""

KEPT_QUIET = ("urls", "api_key_env")
"""Settings whose wrong values are not repeated: somebody may have put a key there."""

Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A part of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Models(Section):
    world: str | None = Field(
        None, description="embedded world that provides models and prompts: clean, drift; empty: use paths"
    )
    student_size: str | None = Field(None, description="size of the world's student; empty: the world's default")
    teacher_size: str | None = Field(None, description="size of the world's teacher; empty: the world's default")
    lineage: int = Field(0, ge=0, description="which of the world's lineages (data order and initialisation of its models)")
    student: str | None = Field(None, description="student: local folder, hub id or GGUF file (not with a world)")
    teacher: str | None = Field(None, description="teacher: local folder, hub id or GGUF file (not with a world)")
    reference: str | None = Field(
        None, description="reference for ExOPD and the auxiliary KL; empty: the student's initial weights"
    )
    student_gguf_file: str | None = Field(None, description="GGUF file in the student's folder or repository")
    teacher_gguf_file: str | None = Field(None, description="GGUF file in the teacher's folder or repository")
    reference_gguf_file: str | None = Field(None, description="GGUF file in the reference's folder or repository")
    student_revision: str | None = Field(None, description="commit, tag or branch of the student on the hub; pin a commit")
    teacher_revision: str | None = Field(None, description="commit, tag or branch of the teacher on the hub")
    reference_revision: str | None = Field(None, description="commit, tag or branch of the reference on the hub")
    dtype: Dtype = Field("float32", description="precision in which models are loaded")
    teacher_dtype: Dtype | None = Field(None, description="precision of the teacher; empty: as dtype")
    attention: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = Field(
        None, description="attention implementation of all models; empty: transformers chooses"
    )
    teacher_device: str | None = Field(
        None, description="device of the teacher: cpu, cuda:1, or auto (spread); empty: that of the student"
    )
    trust_remote_code: bool = Field(False, description="run model code that a repository brings along")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.world is None and not (self.student and self.teacher):
            raise ValueError("give models.world, or both models.student and models.teacher")
        if self.world is not None and (self.student or self.teacher):
            raise ValueError("models.world brings student and teacher; leave models.student and models.teacher out")
        for name in ("student", "teacher", "reference"):
            if getattr(self, name) is None and (getattr(self, f"{name}_gguf_file") or getattr(self, f"{name}_revision")):
                raise ValueError(f"models.{name}_gguf_file and models.{name}_revision need models.{name}")
        return self


class Lora(Section):
    """Train an adapter instead of the whole student. Needs the extra `lora`."""

    rank: int = Field(0, ge=0, description="rank of the student's LoRA matrices; 0: train all weights")
    alpha: float = Field(32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    targets: list[str] = Field(
        ["all-linear"], min_length=1, description="names of the layers that get one; all-linear: all but the output matrix"
    )
    quantize: Literal["none", "4bit", "8bit"] = Field(
        "none", description="keep the frozen weights quantised (QLoRA): needs bitsandbytes and a GPU"
    )

    @model_validator(mode="after")
    def _quantised_base_needs_an_adapter(self) -> Self:
        if self.quantize != "none" and not self.rank:
            raise ValueError("quantised weights cannot be trained: set lora.rank, or lora.quantize = 'none'")
        return self


class DataSet(Section):
    """One entry of `data.sets`; what is left empty is as in the named set, or as `data.sets.PromptSet` has it."""

    source: str = Field(description="deepmath, eurus-code, a JSONL or parquet file, a folder of them, or hub:org/name")
    weight: float = Field(1.0, gt=0, description="share of every step's prompts, relative to the other sets")
    name: str | None = Field(None, min_length=1, description="begins the ids of its prompts")
    files: str | None = Field(None, description="pattern of files, e.g. data/train-*.parquet; empty: the training split")
    revision: str | None = Field(None, description="commit, tag or branch on the hub")
    prompt_field: str | None = Field(None, description="name of the field with the prompt: a text or a list of messages")
    messages_field: str | None = Field(None, description="name of the field with a list of messages")
    answer_field: str | None = Field(None, description="name of the field with the answer; '': not read")
    id_field: str | None = Field(None, description="name of the field with the id")
    teacher_field: str | None = Field(None, description="name of the field that names the teacher of a prompt")
    teacher: str | None = Field(None, description="teacher of the prompts that name none")
    keep_fields: list[str] | None = Field(None, description="further parquet columns to keep with a prompt")
    filter: str | None = Field(None, description="e.g. difficulty >= 6 and topic != 'geometry'")
    suffix: str | None = Field(None, description="follows the last user message")
    drop_system: bool | None = Field(None, description="leave system messages out")
    unique: bool | None = Field(None, description="leave prompts out that occurred before")

    @model_validator(mode="after")
    def _filter_reads(self) -> Self:
        if self.filter:
            parse_filter(self.filter)
        return self


class Data(Section):
    prompts: str | None = Field(None, description="JSONL file of training prompts (not with a world)")
    sets: list[DataSet] = Field([], description="training sets and their mixture instead of one file, see docs/data.md")
    train_size: int = Field(4096, ge=1, description="training prompts to draw from an embedded world")
    max_prompt_tokens: int = Field(2048, ge=1, description="longer prompts are left out (and counted), never cut")


class Method(Section):
    advantage: Literal["opd", "exopd"] = Field("opd", description="opd, or exopd with its extrapolated reward")
    weights: str = Field("uniform", description="weight rule: see `iwopd methods`")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the weight rule, e.g. {gamma = 0.5}")
    scale: float = Field(1.25, gt=0, description="ExOPD's reward scale lambda")
    weighting: Literal["reward-scale", "advantage"] = Field("reward-scale", description="where IW-ExOPD applies the weights")
    clip: float = Field(0.2, gt=0, description="PPO clip, both sides")
    dual_clip: float = Field(3.0, gt=1, description="cap of the ratio for negative advantages; inf: off")
    correction_threshold: float = Field(5.0, gt=0, description="truncation of the rollout correction (other engines only)")
    entropy_coef: float = Field(0.0, ge=0, description="entropy bonus")
    kl_coef: float = Field(0.0, ge=0, description="auxiliary KL to the reference, low-variance form")

    @model_validator(mode="after")
    def _rule_exists(self) -> Self:
        nothing = torch.zeros(1, 2)
        try:  # on two tokens: wrong names and values are found here, not after the first rollouts
            algo.token_weights(self.weights, nothing, nothing == 0, progress=0.0, **self.params)
        except TypeError as error:
            raise ValueError(f"params {self.params}: {error}") from None
        return self

    @property
    def signal(self) -> dict[str, Any]:
        """The method's arguments of `algo.signal.training_signal`."""
        return {
            "advantage": self.advantage,
            "weights": self.weights,
            "weight_params": self.params,
            "scale": self.scale,
            "weighting": self.weighting,
        }

    @property
    def needs_reference(self) -> bool:
        return self.advantage == "exopd" or self.kl_coef > 0


class RolloutSettings(Section):
    engine: Literal["local", "vllm", "server"] = Field(
        "local", description="who writes: local (this process, transformers), vllm (in this process), server (vllm.url)"
    )
    prompts_per_step: int = Field(64, ge=1, description="prompts of one step")
    samples: int = Field(1, ge=1, description="rollouts per prompt")
    max_tokens: int | None = Field(None, ge=1, description="longest response; empty: what the world's answers need")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it, too")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1: off")
    top_k: int = Field(0, ge=0, description="keep the k likeliest ids; 0: off")
    stop_tokens: list[str] = Field(
        [], description="tokens that end an answer, besides those of tokenizer and generation config"
    )
    truncated: Literal["keep", "mask", "drop"] = Field(
        "keep", description="rollouts cut off by max_tokens: train on them or not"
    )
    chunks: int | None = Field(
        None, ge=1, description="the teacher scores one chunk while the next is written; empty: 2 with a server, else 1 (off)"
    )


class TeacherSource(Section):
    """Where a teacher is, and what it sees."""

    urls: list[str] = Field([], description="servers (replicas) that score, e.g. ['http://gpu1:8000']; empty: a local model")
    name: str | None = Field(None, description="what the servers call the model; empty: models.teacher, or their only one")
    dialect: Literal["vllm", "sglang"] = Field("vllm", description="vllm (also `iwopd serve-teacher`), or sglang")
    api_key_env: str | None = Field(None, description="environment variable that holds the servers' API key; empty: no key")
    max_in_flight: int = Field(16, ge=1, description="requests under way at once, for each server")
    tokens_per_request: int = Field(8192, ge=1, description="short rollouts travel together up to so many tokens")
    request_timeout: float = Field(300.0, gt=0, description="seconds for one attempt at one request")
    patience: float = Field(600.0, gt=0, description="seconds that a teacher may be away before the run saves and ends")
    deadline: float = Field(7200.0, gt=0, description="seconds for the scores of one step (or chunk of it)")
    system: str | None = Field(None, description="system prompt that the teacher sees instead of the student's")
    user: str | None = Field(
        None, description="user message that the teacher sees: {prompt}, {answer} and the data set's fields are filled in"
    )

    @field_validator("urls")
    @classmethod
    def _plain_urls(cls, urls: list[str]) -> list[str]:
        return [_server_url(url) for url in urls]

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not name.isidentifier():
            raise ValueError("must be the name of an environment variable, not the key itself")
        return name

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


class Vllm(Section):
    """vLLM for rollouts: rollout.engine = "vllm" or "server"."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="precision of the engine's copy of the student; empty: models.dtype"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and answer together; empty: what prompts and max_tokens can come to"
    )
    memory_share: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory that the engine may take (engine vllm)")
    cache_gb: float | None = Field(
        None, gt=0, description="key/value cache in GB; empty: what memory_share leaves (on a CPU: 1)"
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs of the engine (engine vllm; above 1 it was never run)")
    eager: bool = Field(False, description="no CUDA graphs, no compilation: starts faster, runs slower")
    sleep: bool = Field(False, description="give the GPU's memory back between rollouts (engine vllm; was never run)")
    url: str | None = Field(None, description="server for rollouts, e.g. http://gpu1:8000 (engine server)")
    name: str | None = Field(None, description="what the server calls the student; empty: its only model")
    weights_folder: str | None = Field(
        None, description="folder, for this run alone, that the server sees under the same name: new weights go through it"
    )
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key; empty: no key")
    max_in_flight: int = Field(64, ge=1, description="requests under way at once (engine server)")
    request_timeout: float = Field(1800.0, gt=0, description="seconds for one attempt at one request (engine server)")
    patience: float = Field(120.0, gt=0, description="seconds that a server may be away before the run ends")
    mismatch_limit: float | None = Field(
        None, gt=0, description="mean |difference| of engine's and trainer's log-probs that ends a run; empty: by dtype"
    )

    @model_validator(mode="after")
    def _plain_server(self) -> Self:
        if self.url is not None and (not self.url.startswith(("http://", "https://")) or "@" in self.url):
            raise ValueError("vllm.url looks like http://host:8000, without a password: name a variable in vllm.api_key_env")
        if self.api_key_env is not None and not self.api_key_env.isidentifier():
            raise ValueError("vllm.api_key_env must be the name of an environment variable, not the key itself")
        return self


class Optim(Section):
    lr: float = Field(1e-5, gt=0, description="learning rate (constant)")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's betas")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    ppo_epochs: int = Field(1, ge=1, description="passes over the rollouts of a step")
    mini_batches: int = Field(1, ge=1, description="optimizer updates per pass")
    token_budget: int = Field(8192, ge=1, description="padded tokens of one micro-batch")
    gradient_checkpointing: bool = Field(False, description="trade time for memory in the update")


class Eval(Section):
    every: int = Field(10, ge=1, description="evaluate every so many steps (and before the first and after the last)")
    tasks: list[str] = Field([], description="tasks of `iwopd eval`; empty: the embedded world's own, if there is a world")
    data: dict[str, str] = Field(default_factory=dict, description="data file of a task, e.g. {aime25 = 'problems.jsonl'}")
    prompts: int = Field(256, ge=0, description="problems of each task, the first ones; 0: no evaluation")
    samples: int = Field(1, ge=1, description="samples per evaluation prompt")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; empty: as in training")
    kept_rollouts: int = Field(8, ge=0, description="rollouts kept in full per evaluation, for the report")


class CheckpointSettings(Section):
    every: int = Field(10, ge=1, description="save every so many steps (and after the last)")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")
    best: str | None = Field(None, description="task whose accuracy names the best checkpoint, which stays, too; empty: none")


class Tracking(Section):
    console: Literal["auto", "live", "plain", "off"] = Field("auto", description="live: progress display; plain: a line a step")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        [], description="further trackers; JSONL is always written"
    )
    project: str = Field("iwopd", description="project name for trackers that have one")


class Config(Section):
    """All settings of a training run."""

    seed: int = Field(0, ge=0, description="of prompt order and sampling noise; equal across methods for paired runs")
    steps: int = Field(40, ge=1, description="optimizer steps (rollout batches)")
    threads: int | None = Field(None, ge=1, description="CPU threads; results are bitwise equal only for equal numbers")
    precision: Literal["no", "bf16"] = Field("no", description="mixed precision of the student's forward pass (autocast)")
    models: Models = Field(default_factory=Models.model_construct)
    lora: Lora = Lora()
    data: Data = Data()
    method: Method = Method()
    rollout: RolloutSettings = RolloutSettings()
    vllm: Vllm = Vllm()
    optim: Optim = Optim()
    eval: Eval = Eval()
    checkpoint: CheckpointSettings = CheckpointSettings()
    teacher: Teacher = Teacher()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _prompts_exist(self) -> Self:
        if self.models.world is None and self.data.prompts is None and not self.data.sets:
            raise ValueError(
                "without models.world, data.prompts must name a JSONL file of prompts, or data.sets list some sets"
            )
        if self.data.sets and (self.models.world is not None or self.data.prompts is not None):
            other = "models.world brings its own prompts" if self.models.world is not None else "data.prompts is the short form"
            raise ValueError(f"data.sets is given, but {other}: leave one of them out")
        return self

    @model_validator(mode="after")
    def _servers_score_at_one(self) -> Self:
        if self.teacher.has_servers and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature is {self.rollout.temperature}, but teacher servers score at temperature 1, and log-probs "
                "of two temperatures make no gap: sample at 1, or use a local teacher"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> Self:
        rollout = self.rollout
        if rollout.engine != "local" and (rollout.top_p < 1 or rollout.top_k):
            raise ValueError(
                f"rollout.top_p is {rollout.top_p} and rollout.top_k {rollout.top_k}: the log-probs of rollout.engine "
                f"{rollout.engine!r} would then be over the ids that were left; set top_p = 1 and top_k = 0, or engine 'local'"
            )
        if rollout.engine == "server" and not (self.vllm.url and self.vllm.weights_folder):
            raise ValueError(
                "rollout.engine = 'server' needs vllm.url, and for training vllm.weights_folder: a folder that this machine "
                "and the server share, through which it gets the weights of every step (docs/vllm.md); or use engine = 'vllm'"
            )
        return self


# --- recipes and overrides -------------------------------------------------------------------------------------------


def load_config(recipe: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML recipe, apply dotted overrides (`{"optim.lr": "1e-4"}`), validate."""
    values: dict[str, Any] = {}
    if recipe is not None:
        try:
            values = tomllib.loads(recipe.read_text())
        except FileNotFoundError:
            raise ConfigError(f"no recipe at {recipe}{_nearby(recipe)} (the recipe comes first, settings after it)") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{recipe} is not TOML: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {recipe}: {error.strerror}") from None
    for name, value in (overrides or {}).items():
        _set(values, name, value)
    return make_config(values, where=str(recipe) if recipe else "the settings")


def make_config(values: Mapping[str, Any], where: str = "the settings") -> Config:
    """Validate a plain dictionary; a wrong one becomes a `ConfigError` with one line a fault."""
    _refuse_unknown(values, where)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def config_toml(config: Config) -> str:
    """The resolved tree as TOML; settings that are empty are left out, so reading it gives the same tree."""
    tree = config.model_dump(exclude_none=True)
    tree["method"]["params"] = {name: value for name, value in config.method.params.items() if value is not None}
    return tomli_w.dumps(tree)


def differences(old: Config, new: Config, ignore: Sequence[str] = ()) -> list[str]:
    """Lines `name: old -> new` for every setting in which two trees differ."""
    before, after = dict(flatten(old.model_dump(mode="json"))), dict(flatten(new.model_dump(mode="json")))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in names
        if not name.startswith(tuple(ignore) or ("\0",))
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested dictionary; an open table counts as one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in OPEN_TABLES:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def settings(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every setting, in order: what `--help` prints."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from settings(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def parse_value(text: str) -> Any:
    """A value from the command line: TOML where it is TOML (`1e-4`, `true`, `{gamma = 1}`), else the text itself (`drift`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: {section} is a setting, not a section")
    values[last] = value


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    known = [name for name, _ in settings()]
    for name, _ in flatten(values):
        if name not in known and not name.startswith(tuple(f"{table}." for table in OPEN_TABLES)):
            tail = name.rpartition(".")[2]
            siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == name.rpartition(".")[0]}
            near = [siblings[key] for key in difflib.get_close_matches(tail, siblings, n=1, cutoff=0.8)]
            near = near or [key for key in known if key.rpartition(".")[2] == tail]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "`iwopd train --help` lists all settings"
            raise ConfigError(f"{where}: unknown setting {name!r}; {hint}")


def _explain(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault.get("input")
    quiet = isinstance(value, Mapping) or value is None or any(part in KEPT_QUIET for part in fault["loc"])
    given = "" if quiet else f" (given: {json.dumps(value, default=str)})"
    if fault.get("type") == "extra_forbidden":  # inside a list: `_refuse_unknown` sees lists as one value
        known = {field for section in Section.__subclasses__() for field in section.model_fields}
        near = difflib.get_close_matches(name.rpartition(".")[2], sorted(known), n=1)
        message = "there is no such setting" + (f"; did you mean {near[0]!r}?" if near else "")
    return f"{name}: {message}{given}" if name else message


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


def _nearby(recipe: Path) -> str:
    folder = recipe.parent
    names = sorted(str(path) for path in folder.glob("*.toml")) if folder.is_dir() else []
    near = difflib.get_close_matches(str(recipe), names, n=1)
    return f"; did you mean {near[0]}?" if near else ""

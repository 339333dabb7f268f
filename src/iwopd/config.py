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

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from iwopd import algo
from iwopd.errors import UserError


class ConfigError(UserError, ValueError):
    """A setting that is wrong, said in words for the person who wrote it."""


OPEN_TABLES = ("method.params", "eval.data")
"""Tables whose keys are the user's."""

Beta = Annotated[float, Field(ge=0, lt=1)]


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
    student: str | None = Field(None, description="student: local folder or hub id (not with a world)")
    teacher: str | None = Field(None, description="teacher: local folder or hub id (not with a world)")
    reference: str | None = Field(
        None, description="reference for ExOPD and the auxiliary KL; empty: the student's initial weights"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="precision in which models are loaded")
    trust_remote_code: bool = Field(False, description="run model code that a repository brings along")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.world is None and not (self.student and self.teacher):
            raise ValueError("give models.world, or both models.student and models.teacher")
        if self.world is not None and (self.student or self.teacher):
            raise ValueError("models.world brings student and teacher; leave models.student and models.teacher out")
        return self


class Data(Section):
    prompts: str | None = Field(None, description="JSONL file of training prompts (not with a world)")
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
    truncated: Literal["keep", "mask", "drop"] = Field(
        "keep", description="rollouts cut off by max_tokens: train on them or not"
    )


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
    data: Data = Data()
    method: Method = Method()
    rollout: RolloutSettings = RolloutSettings()
    vllm: Vllm = Vllm()
    optim: Optim = Optim()
    eval: Eval = Eval()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _prompts_exist(self) -> Self:
        if self.models.world is None and self.data.prompts is None:
            raise ValueError("without models.world, data.prompts must name a JSONL file of prompts")
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
            near = [key for key in known if key.rpartition(".")[2] == tail]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "`iwopd train --help` lists all settings"
            raise ConfigError(f"{where}: unknown setting {name!r}; {hint}")


def _explain(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault.get("input")
    given = "" if isinstance(value, Mapping) or value is None else f" (given: {json.dumps(value, default=str)})"
    return f"{name}: {message}{given}" if name else message


def _nearby(recipe: Path) -> str:
    folder = recipe.parent
    names = sorted(str(path) for path in folder.glob("*.toml")) if folder.is_dir() else []
    near = difflib.get_close_matches(str(recipe), names, n=1)
    return f"; did you mean {near[0]}?" if near else ""

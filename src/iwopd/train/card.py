"""The model card: README.md beside saved weights, so that a folder tells where it comes from."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

import iwopd
from iwopd.config import Config, without
from iwopd.config.own_teacher import WORDS
from iwopd.methods import method_title
from iwopd.models import ModelSource
from iwopd.runs.directory import RunDirectory
from iwopd.train.horizon import longest_answer
from iwopd.train.loading import source_of
from iwopd.train.origin import Origin, origin

SECTIONS = ("method", "rollout", "optim", "lora", "reward", "ema")
"""What decides the result, besides models and data."""
NUMBERS = ("steps", "seed", "precision", "head_precision")
OWN_LICENCE = "apache-2.0"
PACKAGES = ("torch", "transformers", "accelerate", "peft")


def model_card(config: Config, run: RunDirectory, step: int) -> str:
    """The card of the student after `step`; evaluations up to it come from the run's log."""
    parts = [
        _front_matter(config),
        f"# {model_name(config, 'student')}, distilled",
        f"Student after step {step} of {config.steps} of on-policy distillation with iwopd.",
        _origin(config, run),
        "## Evaluation\n\n" + _evaluations(run, step),
        "## Parameters\n\n```toml\n" + _parameters(config) + "```",
        "## Versions\n\n" + _versions(),
        _usage(config),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(config: Config) -> str:
    """What the hub reads. Strings are quoted as JSON, which YAML understands."""
    values: dict[str, Any] = {"library_name": "peft" if config.lora.rank else "transformers"}
    base = origin_of(config)
    if base.name:
        values |= {"base_model": base.name, "base_model_relation": "adapter" if config.lora.rank else "finetune"}
    if base.licence:
        values["license"] = base.licence
    values["tags"] = ["iwopd", "on-policy-distillation"]
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"])


def origin_of(config: Config) -> Origin:
    """Of the student."""
    if config.models.world is not None:
        return Origin(licence=OWN_LICENCE)  # it is this package's, and on no hub
    source = source_of(config, "student")
    return Origin() if source is None else origin(source)


def _origin(config: Config, run: RunDirectory) -> str:
    rows = {
        "student": model_name(config, "student"),
        "licence of the student": origin_of(config).licence or "not known here: see where the student comes from",
        "teacher": model_name(config, "teacher"),
        "method": method_title(config.method.model_dump()),
        "trained weights": f"LoRA adapter, rank {config.lora.rank}" if config.lora.rank else "all",
        "prompts": _data(config),
        "fingerprint of the prompts": run.about().get("data", "unknown"),
        "seed": config.seed,
    }
    if config.method.made.needs_reference:
        initial = WORDS.get(config.reference.source, "the student before training")
        rows["reference"] = model_name(config, "reference") if config.models.reference else initial
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def model_name(config: Config, name: str, *, paths: bool = False) -> str:
    """A hub id with its revision; a local folder by its last name, which is what others may know it by, or by its path."""
    models = config.models
    if name == "teacher" and config.teacher.is_student:
        return f"{WORDS[config.teacher.source]} (teacher.source = {config.teacher.source!r})"
    if models.world is not None and name != "reference":
        size = getattr(models, f"{name}_size") or "default"
        return f"{name} of the embedded world {models.world} (size {size}, lineage {models.lineage})"
    source = source_of(config, name)
    if source is None:
        return "none"
    if not paths and (source.is_local or source.path.startswith(("/", "."))):
        source = ModelSource(Path(source.path).name, source.gguf_file)
    return str(source)


def _data(config: Config) -> str:
    if config.models.world is not None:
        return f"{config.data.train_size} of the embedded world {config.models.world}"
    return Path(str(config.data.prompts)).name if config.data.prompts else "see the run's config.toml"


def _evaluations(run: RunDirectory, step: int) -> str:
    table: dict[str, dict[int, str]] = {}
    for record in run.read("evals.jsonl"):
        if record["step"] <= step:
            score = f"{100 * record['mean']:.1f} % ({record['problems']} problems x {record['samples']})"
            table.setdefault(record["task"], {})[record["step"]] = score
    if not table:
        return "None was made during training."
    rows = ["| task | before training | after step | score |", "| --- | --- | --- | --- |"]
    for task, scores in table.items():
        last = max(scores)
        rows.append(f"| {_cell(task)} | {scores.get(0, '')} | {last} | {scores[last]} |")
    return "\n".join(rows)


def _parameters(config: Config) -> str:
    """Also those that are defaults: they may be others in the next version."""
    tree = without(config.model_dump(exclude_none=True), "place")
    made = config.method.made
    params = {**made.rule.params, **made.params}
    tree["method"]["params"] = {name: value for name, value in params.items() if value is not None}  # TOML has no null
    tree["rollout"].setdefault("max_tokens", longest_answer(config))
    if config.reward.checker is None:
        del tree["reward"]
    if not config.keeps_average:
        del tree["ema"]
    shown = {name: tree[name] for name in (*NUMBERS, *SECTIONS) if name in tree}
    return tomli_w.dumps({**shown, "models": {"dtype": config.models.dtype}})


def _versions() -> str:
    found = [f"iwopd {iwopd.__version__}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def _usage(config: Config) -> str:
    note = (
        "\n\nThis folder holds an adapter: peft must be installed, and the student's own weights must be where "
        "adapter_config.json says. `iwopd export RUN OUT --merge` makes a folder that needs neither."
    )
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("this folder")\n```' + (note if config.lora.rank else "")
    )


def _cell(value: object) -> str:
    """One cell of a table, whatever a name contains."""
    return " ".join(str(value).split()).replace("|", "\\|")

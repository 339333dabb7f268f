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
from iwopd.train.loading import source_of

SECTIONS = ("method", "rollout", "optim", "lora")
"""What decides the result, besides models and data."""
PACKAGES = ("torch", "transformers", "accelerate", "peft")


def model_card(config: Config, run: RunDirectory, step: int) -> str:
    """The card of the student after `step`; evaluations up to it come from the run's log."""
    parts = [
        _front_matter(config),
        f"# {_model_name(config, 'student')}, distilled",
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
    source = source_of(config, "student")
    if source is not None and not source.is_local and not source.path.startswith(("/", ".")):
        values["base_model"] = source.path
    values["tags"] = ["iwopd", "on-policy-distillation"]
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"])


def _origin(config: Config, run: RunDirectory) -> str:
    rows = {
        "student": _model_name(config, "student"),
        "teacher": _model_name(config, "teacher"),
        "method": method_title(config.method.model_dump()),
        "trained weights": f"LoRA adapter, rank {config.lora.rank}" if config.lora.rank else "all",
        "prompts": _data(config),
        "fingerprint of the prompts": run.about().get("data", "unknown"),
        "seed": config.seed,
    }
    if config.method.made.needs_reference:
        initial = WORDS.get(config.reference.source, "the student before training")
        rows["reference"] = _model_name(config, "reference") if config.models.reference else initial
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def _model_name(config: Config, name: str) -> str:
    """A hub id with its revision; a local folder by its last name, which is what others may know it by."""
    models = config.models
    if name == "teacher" and config.teacher.is_student:
        return f"{WORDS[config.teacher.source]} (teacher.source = {config.teacher.source!r})"
    if models.world is not None and name != "reference":
        size = getattr(models, f"{name}_size") or "default"
        return f"{name} of the embedded world {models.world} (size {size}, lineage {models.lineage})"
    source = source_of(config, name)
    if source is None:
        return "none"
    if source.is_local or source.path.startswith(("/", ".")):
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
    tree = without(config.model_dump(exclude_none=True), "place")
    return tomli_w.dumps({"steps": config.steps, "seed": config.seed, **{name: tree[name] for name in SECTIONS}})


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

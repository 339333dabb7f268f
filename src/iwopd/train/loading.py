"""Student, teacher and reference as the settings describe them."""

from __future__ import annotations

from typing import Any

import torch

from iwopd import tiny
from iwopd.adapters import add_adapter
from iwopd.config import Config, ConfigError
from iwopd.config.own_teacher import ReferenceWeights
from iwopd.models import ModelSource, load_model
from iwopd.quantization import quantization


def open_world(config: Config, progress: tiny.PretrainingListener | None) -> tiny.World | None:
    """The embedded world that the settings name, its models trained if they are not there yet."""
    recipe = world_recipe(config)
    return None if recipe is None else tiny.open_world(recipe, progress=progress)


def planned_world(config: Config) -> tiny.World | None:
    """The same without training: its prompts, its checker, and where its models are or will be."""
    recipe = world_recipe(config)
    return None if recipe is None else tiny.planned_world(recipe)


def world_recipe(config: Config) -> tiny.WorldRecipe | None:
    models = config.models
    if models.world is None:
        return None
    named = {
        "teacher": models.teacher_size,
        "student": models.student_size,
        "teacher_tokenizer": models.teacher_tokenizer,
    }
    given = {name: value for name, value in named.items() if value is not None}
    try:
        return tiny.world_recipe(models.world, lineage=models.lineage, **given)
    except ValueError as error:
        raise ConfigError(f"models.world: {error}") from None


def source_of(config: Config, name: str, world: tiny.World | None = None) -> ModelSource | None:
    """Where `student`, `teacher` or `reference` comes from; None for a reference that nobody named, and for a teacher that is
    the student itself.
    """
    if name == "teacher" and config.teacher.is_student:
        return None
    if world is not None and name != "reference":
        return ModelSource(str(getattr(world, name)))
    path = getattr(config.models, name)
    if path is None:
        return None
    revision, gguf_file = getattr(config.models, f"{name}_revision"), getattr(config.models, f"{name}_gguf_file")
    source = ModelSource.of(path, revision=revision)
    if gguf_file is not None and source.gguf_file is not None:
        raise ConfigError(f"models.{name} names a GGUF file already: leave models.{name}_gguf_file out")
    return source if gguf_file is None else ModelSource(source.path, gguf_file, revision)


def reference_source(config: Config, world: tiny.World | None = None) -> ModelSource | None:
    """Where the reference comes from; None if it is the student itself (`reference_weights`), or none is needed."""
    if reference_weights(config, world) != "model":
        return None
    return source_of(config, "reference", world) or source_of(config, "student", world)


def reference_weights(config: Config, world: tiny.World | None = None) -> ReferenceWeights | None:
    """Whose weights the reference has; None if none is needed. The student's initial ones are those under its adapter."""
    if not config.method.made.needs_reference:
        return None
    if config.reference.source != "model":
        return config.reference.source
    named, student = source_of(config, "reference", world), source_of(config, "student", world)
    return "base" if config.lora.rank and named in (None, student) else "model"


def check_trainable(config: Config) -> None:
    """Refuse a student that could be loaded, but not trained."""
    if config.models.dtype == "float16":
        raise ConfigError(
            "models.dtype = 'float16' cannot be trained here: a token's share of the gradient is below float16's smallest "
            "number, and this trainer does not scale losses. Set 'bfloat16' or 'float32'; teacher_dtype may be 'float16'"
        )


def load_student(config: Config, source: ModelSource, device: torch.device) -> Any:
    """The student, with its adapter if it gets one."""
    model = _load(config, source, device, config.models.dtype, quantization(config.lora.quantize, "lora.quantize"))
    if config.lora.rank:
        add_adapter(model, config.lora.rank, config.lora.alpha, config.lora.targets)
        model.peft_config["default"].revision = source.revision
    return model


def load_teacher(config: Config, source: ModelSource, device: torch.device) -> Any:
    models = config.models
    quantized = quantization(models.teacher_quantize, "models.teacher_quantize")
    return _load(config, source, models.teacher_device or device, models.teacher_dtype or models.dtype, quantized).eval()


def load_reference(config: Config, source: ModelSource, device: torch.device) -> Any:
    return _load(config, source, device, config.models.dtype).eval()


def _load(config: Config, source: ModelSource, device: torch.device | str, dtype: str, quantized: Any = None) -> Any:
    trust, attention = config.models.trust_remote_code, config.models.attention
    return load_model(source, dtype=dtype, device=device, trust_remote_code=trust, attention=attention, quantization=quantized)

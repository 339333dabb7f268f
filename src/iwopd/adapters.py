"""LoRA adapters inside a model, through peft.

An adapter is injected into the model's own modules, so the model's interface stays the same: its head, its attention, its
`save_pretrained` (which then writes the adapter alone). With the adapter switched off it is the initial
model, so the reference needs no second copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iwopd.models import ModelError

PREFIX = "base_model.model."
"""peft's prefix of an adapter's tensor names in a file."""


def add_adapter(model: Any, rank: int, alpha: float, targets: list[str]) -> None:
    """Freeze the model and add a LoRA adapter; its B matrices are 0, so the outputs do not change yet."""
    chosen: Any = targets[0] if targets == ["all-linear"] else targets
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's layout
    settings = adapter_settings(rank, alpha, chosen, transposed=transposed)
    try:
        model.add_adapter(settings)
    except ValueError as error:
        raise ModelError(f"lora.targets {targets} does not fit a {type(model).__name__}: {error}") from None
    adapter = model.peft_config["default"]
    base = Path(model.name_or_path)
    adapter.base_model_name_or_path = str(base.absolute()) if base.is_dir() else model.name_or_path
    adapter.target_modules = sorted(adapter.target_modules)  # a set's order would change the file from run to run
    adapter.inference_mode = True  # for loading the saved adapter; here the layers are already in training mode
    if is_adapter_layer(model.get_output_embeddings()) or is_adapter_layer(model.get_input_embeddings()):
        raise ModelError(
            f"lora.targets {targets} names the output matrix or the embedding, which the fused head uses as it is: leave it out"
        )
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()  # small, and Adam's steps would vanish in half precision


def adapter_settings(rank: int, alpha: float, targets: list[str] | str, *, transposed: bool = False) -> Any:
    """Settings of an adapter for peft, which it saves as adapter_config.json."""
    return _peft().LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,  # the update must see the policy that sampled the rollouts
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=transposed,
    )


def has_adapter(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before training. Inside, adapters take no gradients; graphs built before keep theirs.

    It may be entered again inside itself.
    """
    layers: list[Any] = [module for module in model.modules() if is_adapter_layer(module)]
    layers = [layer for layer in layers if not layer.disable_adapters]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapter's tensors, sharing the model's memory, by the names they have in a file."""
    tensors = _peft().get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}


def base_fingerprint(model: Any) -> str:
    """Identifies a frozen model: a hash of the shapes and first numbers of every tensor."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            first = parameter.detach().flatten()[:64].float().cpu()
            digest.update(repr((name.replace(".base_layer", ""), list(parameter.shape))).encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Layers with a LoRA adapter, by name."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """The weight of a LoRA layer with its active adapters added; the sum is taken in float32 at least."""
    weight: Tensor = layer.base_layer.weight.detach()
    total = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for name in layer.active_adapters:
        if name in layer.lora_A:
            total = total + layer.get_delta_weight(name)
    return total.to(weight.dtype)


def merge(base: Any, adapter_folder: Path) -> Any:
    """`base` with the adapter of a folder added into its weights: a plain model again."""
    adapted: Any = _peft().PeftModel.from_pretrained(base, str(adapter_folder))
    for _, layer in adapter_layers(adapted):
        layer.base_layer.weight.data = merged_weight(layer)
    return adapted.unload()


def is_adapter_layer(module: object) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError("LoRA needs the package peft: pip install 'iwopd[lora]', or set lora.rank = 0") from None
    return peft

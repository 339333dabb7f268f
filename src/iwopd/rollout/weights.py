"""The student's weights as another engine wants them: by the names they have in a checkpoint, adapters added in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from iwopd.adapters import adapter_layers, merged_weight
from iwopd.rollout.engine import EngineError

SHARD_BYTES = 4 * 2**30
"""Weights of one file; so much is copied at a time."""


class WeightSyncError(EngineError):
    """Weights that cannot reach the engine that writes the rollouts."""


@torch.no_grad()
def weights_version(model: nn.Module) -> list[float]:
    """Tells whether weights have changed: the sum of every parameter. (torch's own counter of writes misses fused AdamW.)"""
    return torch.stack([parameter.sum(dtype=torch.float64).cpu() for parameter in model.parameters()]).tolist()


@torch.no_grad()
def checkpoint_weights(model: Any, *, untied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and values as `save_pretrained` would write them, adapters added in; plain parameters share the model's memory.

    `untied`: an output matrix that is the embedding comes, too, under its own name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if getattr(model.config, "quantization_config", None) is not None:
        raise WeightSyncError(
            "the student's weights are quantised, and an engine would need them whole: set rollout.engine = 'local', or train "
            "without quantisation (lora.quantize = 'none')"
        )
    merged = {f"{name}.": module for name, module in adapter_layers(model)}
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layer = next((layer for layer in merged if name.startswith(layer)), None)
        if layer is None:
            weights[name] = parameter.detach()
        elif name == f"{layer}base_layer.weight":
            weights[f"{layer}weight"] = merged_weight(merged[layer])
        elif name.startswith(f"{layer}base_layer."):
            weights[layer + name.removeprefix(f"{layer}base_layer.")] = parameter.detach()
    if untied:
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        weights.setdefault(f"{name}.weight", head.weight.detach())
    yield from revert_weight_conversion(model, weights).items()


def plain_config(model: Any, *, untied: bool = False) -> Any:
    """The model's config with the architecture by whose name vLLM knows it; `untied`: with an output matrix of its own."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if untied:
        config.tie_word_embeddings = False
    return config


def save_weights(model: Any, folder: Path, *, untied: bool = False) -> None:
    """Write the weights as safetensors and the model's config beside them: a folder that vLLM reads."""
    folder.mkdir(parents=True)
    plain_config(model, untied=untied).save_pretrained(folder)
    shard: dict[str, Tensor] = {}
    size = number = 0
    for name, weight in checkpoint_weights(model, untied=untied):
        if shard and size + weight.nbytes > SHARD_BYTES:
            number, size = number + 1, 0
            save_file(shard, folder / f"model-{number:05d}.safetensors")
            shard = {}
        shard[name] = weight.cpu().contiguous().clone()  # files must not hold views of one memory
        size += weight.nbytes
    save_file(shard, folder / f"model-{number + 1:05d}.safetensors")

"""A model in float32, whatever its weights are: the exact numbers that other paths round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HALF = (torch.float16, torch.bfloat16)


def float32_obstacle(model: Any) -> str | None:
    """Why `in_float32` cannot run this model; None if it can."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if any(isinstance(weight, DTensor) and weight.dtype in HALF for weight in model.parameters()):
        return "its half-precision weights are spread over several processes"
    return None


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Forward passes in float32, without autocast. Weights in half precision are widened one module at a time, while it runs:
    a second copy of the model would need twice its memory again.
    """
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight.dtype in HALF:
                kept[weight] = weight.data
                weight.data = weight.data.float()

    def narrow(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight in kept:
                weight.data = kept.pop(weight)

    owners = [module for module in model.modules() if any(weight.dtype in HALF for weight in module.parameters(recurse=False))]
    handles = [handle for one in owners for handle in (one.register_forward_pre_hook(widen), one.register_forward_hook(narrow))]
    attention = getattr(model.config, "_attn_implementation", None) or ""
    if attention.startswith("flash_attention"):  # whose kernels refuse float32
        model.set_attn_implementation("sdpa")
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for weight, values in kept.items():  # of modules that raised
            weight.data = values
        if attention.startswith("flash_attention"):
            model.set_attn_implementation(attention)

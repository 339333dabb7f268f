"""Which operations a CUDA device allows on tensors of several devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CPU_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Indices on the CPU are brought over."""
CPU_SCALARS = {"index_put", "index_put_", "_index_put_impl_", "masked_fill", "masked_fill_", "fill_", "where", "lerp", "lerp_"}
"""Take a CPU tensor without dimensions as a number, as all pointwise operations do."""


def refuse_mixed(op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise what CUDA raises if a tensor of another device takes part where it may not."""
    for place, argument in enumerate((*args, *kwargs.values())):
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if not isinstance(tensor, Tensor) or tensor.device == device:
                continue
            if place == 1 and name in CPU_INDICES and args[0].device == device:
                continue
            takes_numbers = name in CPU_SCALARS or torch.Tag.pointwise in op.tags
            if tensor.dim() == 0 and takes_numbers and _is_read(op, place, args, kwargs):
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
                f"{tensor.device}! (when computing {op})"
            )


def _is_read(op: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the argument at this place (those by name come last) is only read."""
    declared = op._schema.arguments
    name = declared[place].name if place < len(args) else list(kwargs)[place - len(args)]
    info = next(argument.alias_info for argument in declared if argument.name == name)
    return info is None or not info.is_write

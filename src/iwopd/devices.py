"""Accelerators by torch's device modules: CUDA, and whatever else registers one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from iwopd.errors import UserError

CACHE_BYTES_CPU = 2**31
"""A key/value cache on a CPU, and what steps make in proportion to it: 2 GB."""


class DeviceError(UserError, ValueError):
    """A device that is not here."""


def check_device(name: str, setting: str) -> None:
    """Refuse a device that torch does not know or does not find; `setting` is where its name was written."""
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError, OverflowError):
        raise DeviceError(f"{setting} is {name!r}, which is no device: write cpu, cuda, cuda:1, mps, ...") from None
    if device.type == "cpu":
        return
    count = _count(device)
    if not count:
        raise DeviceError(
            f"{setting} is {name!r}, but torch {torch.__version__} finds no such device here: use cpu, or install a torch that "
            "is built for it (https://pytorch.org), and its driver"
        )
    if (device.index or 0) >= count:
        there = "only one" if count == 1 else f"{count} of them"
        raise DeviceError(f"{setting} is {name!r}, but there is {there} here: {device.type}:0 to {device.type}:{count - 1}")


def _count(device: torch.device) -> int:
    """How many of its kind torch can use."""
    try:
        module: Any = torch.get_device_module(device)
        return int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):  # torch has the name, and nothing behind it
        return 0


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`, without waiting for the work that it has under way. What comes back from a device must
    be waited for: there it is `Tensor.to`.
    """
    return values.to(device, non_blocking=values.device.type == "cpu")


def accelerator() -> torch.device | None:
    """The kind of accelerator that is here and works. torch 2.6 cannot ask for it in one call."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def rng_states() -> dict[str, Tensor]:
    """The states of the accelerators' random generators, by device: `cuda.0`. Empty without one."""
    kind = accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    if kind is None or not hasattr(module, "get_rng_state_all"):  # the generator of a Mac's GPU cannot be set by device
        return {}
    return {f"{kind.type}.{number}": state for number, state in enumerate(module.get_rng_state_all())}


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Bring back what `rng_states` returned, where the device is here."""
    for name, state in states.items():
        kind, _, number = name.partition(".")
        module: Any = torch.get_device_module(kind)
        module.set_rng_state(state, int(number))


def free_bytes(device: torch.device) -> int:
    """Bytes of an accelerator that new tensors can take: what its driver calls free, and what torch's caching allocator holds
    without using it. The driver alone counts the latter as taken, so it seems to have less after every call.
    """
    module: Any = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def total_bytes(device: torch.device) -> int:
    """Bytes of an accelerator's memory."""
    module: Any = torch.get_device_module(device)
    return int(module.mem_get_info(device)[1])


def cache_bytes(device: torch.device, share: float) -> int:
    """What a key/value cache may take at this moment: a share of what is free on an accelerator, `CACHE_BYTES_CPU` on a CPU."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "mem_get_info"):
        return CACHE_BYTES_CPU
    return int(share * free_bytes(device))

"""Opening the pretend GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretend_gpu import backend
from pretend_gpu.autocast import keeps_copies
from pretend_gpu.ledger import Ledger
from pretend_gpu.syncs import Sync


@dataclass
class PretendGPU:
    """An open device."""

    device: torch.device
    memory: Ledger
    """`allocated`, `reserved`, `peak` and `reset_peak()`, in bytes."""
    syncs: list[Sync]
    """Every wait of the host so far, with its place in our code; `syncs.clear()` starts anew."""


@contextmanager
def pretend_gpu(total_bytes: int = 2**36) -> Iterator[PretendGPU]:
    """A device of `total_bytes` that computes on the CPU: `model.to(gpu.device)`.

    It raises on operations that mix devices, as CUDA does, notes every wait of the host for the device, and keeps books of
    memory. Its tensors are of no use after the block. Torch's allocator asks the driver for 2 MB or 20 MB at a time: give it
    a hundred megabytes at least.
    """
    if backend.Open.memory is not None:
        raise RuntimeError("the pretend GPU is open already")
    gpu = PretendGPU(backend.DEVICE, Ledger(total_bytes), [])
    backend.Open.memory, backend.Open.syncs = gpu.memory, gpu.syncs
    torch.get_device_module(gpu.device).manual_seed(0)
    try:
        with keeps_copies(), _parameters_keep_their_identity(), _addresses():
            yield gpu
    finally:
        backend.Open.memory = None


@contextmanager
def _addresses() -> Iterator[None]:
    """`data_ptr()`, by which transformers and safetensors find out who shares memory: that of the numbers."""
    of_storage, of_tensor = torch.UntypedStorage.data_ptr, Tensor.data_ptr

    def storage_address(storage: Any) -> int:
        return of_storage(getattr(storage, "buffer", storage))

    def tensor_address(tensor: Tensor) -> int:
        return of_tensor(backend.lower(tensor))

    torch.UntypedStorage.data_ptr = storage_address  # type: ignore[method-assign, assignment]
    Tensor.data_ptr = tensor_address  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign]
        Tensor.data_ptr = of_tensor  # type: ignore[method-assign]


@contextmanager
def _parameters_keep_their_identity() -> Iterator[None]:
    """`model.to(device)` changes parameters in place on CUDA, so tied ones stay tied. Torch knows how for any device."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)

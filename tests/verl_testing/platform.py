"""A platform `cpu` for verl, and patches of torch where gloo differs from NCCL or an accelerator is required."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry


def install() -> None:
    """Register the platform and adapt torch.distributed; a second call changes nothing."""
    if PlatformRegistry.get("cpu") is PlatformCPU:
        return
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    dist.init_process_group = _one_backend_a_device(dist.init_process_group)
    dist.all_reduce = _average_by_hand(dist.all_reduce)
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]  # no accelerator to copy to


class PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl has no types
    """The CPU as one accelerator per process, without memory, streams and caches."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl passes it to `.to()` and `device=`, where an index would mean a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is only one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for on a CPU."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No allocator of its own."""

    def empty_cache(self) -> None:
        """No cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its resource GPU

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"  # logical ones: `ray start --num-gpus` does not check

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _device_module() -> ModuleType:
    """The functions of `torch.cuda` that verl calls, for a device without memory. (`torch.cpu` lacks some.)"""
    module = ModuleType("iwopd_verl_cpu_device")
    nothing = lambda *_, **__: None  # noqa: E731
    zero = lambda *_, **__: 0  # noqa: E731
    functions: dict[str, Any] = {
        "is_available": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "get_device_name": lambda *_: "CPU",
        "mem_get_info": lambda *_: (0, 0),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"), nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), zero),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


_DEVICE = _device_module()


def _one_backend_a_device(start: Any) -> Any:
    """Keep one backend: verl requests "cpu:gloo,<device>:<backend>", which here names one device twice, which torch refuses."""

    @wraps(start)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
            kwargs["backend"] = "cpu:gloo"
        return start(*args, **kwargs)

    return wrapped


def _average_by_hand(all_reduce: Any) -> Any:
    """Gloo has no AVG: sum and divide."""

    @wraps(all_reduce)
    def wrapped(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op=op, group=group, async_op=async_op)
        if async_op:
            raise NotImplementedError("an asynchronous all_reduce with AVG is not part of the CPU platform for tests")
        all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor.div_(dist.get_world_size(group))

    return wrapped

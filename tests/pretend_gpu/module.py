"""`torch.pretend`: what torch and others ask of a device module, as they ask it of `torch.cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pretend_gpu.backend import Open, ledger, note_sync


class DeviceModule:
    """One device. `device` arguments are there for the form."""

    def is_available(self) -> bool:
        return Open.memory is not None

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1 if self.is_available() else 0

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def synchronize(self, device: object = None) -> None:
        note_sync("synchronize")

    def get_device_name(self, device: object = None) -> str:
        return "pretend GPU"

    def get_device_properties(self, device: object = None) -> Any:
        return SimpleNamespace(name=self.get_device_name(), total_memory=ledger().total)

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        Open.random = torch.Generator().manual_seed(seed).get_state()

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> Tensor:
        return Open.random.clone()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        Open.random = state.clone()

    def get_rng_state_all(self) -> list[Tensor]:
        return [self.get_rng_state()]

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """What the driver knows: it counts all reserved bytes as taken."""
        return ledger().total - ledger().reserved, ledger().total

    def memory_allocated(self, device: object = None) -> int:
        return ledger().allocated

    def memory_reserved(self, device: object = None) -> int:
        return ledger().reserved

    def max_memory_allocated(self, device: object = None) -> int:
        return ledger().peak

    def max_memory_reserved(self, device: object = None) -> int:
        return ledger().peak_reserved

    def reset_peak_memory_stats(self, device: object = None) -> None:
        ledger().reset_peak()

    def empty_cache(self) -> None:
        ledger().empty_cache()

"""A pretend accelerator for tests on machines without a GPU: see `pretend_gpu`.

Import it at the top of a test module: torch must know the device before the first backward pass of the process, and pytest
imports all modules before it runs a test.
"""

from __future__ import annotations

from pretend_gpu.opening import PretendGPU, pretend_gpu
from pretend_gpu.registration import register
from pretend_gpu.syncs import Sync

__all__ = ["PretendGPU", "Sync", "pretend_gpu"]

register()

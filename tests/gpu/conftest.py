"""Every test runs on a CPU in `make test` and on a GPU in `make test-gpu`: the same code, so that its mistakes show on a CPU.

Where there is no GPU, the GPU's half is skipped with the reason.
"""

from __future__ import annotations

import pytest
import torch

from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.gpu.devices import choose_device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    found = choose_device(None if request.param == "cuda" else "cpu")
    if isinstance(found, Finding):
        pytest.skip(found.message)
    return torch.device(found)


@pytest.fixture
def two_of_them(device: torch.device) -> str:
    """The kind of device, of which there are two; CPUs always are."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"there is one GPU, {torch.cuda.get_device_name()}, and two are needed")
    return str(device)

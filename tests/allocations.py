"""How much memory a piece of work takes on the CPU, by the records of torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def _without_onednn() -> Iterator[None]:
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that were allocated at one time while `work` ran, on top of what was there before.

    Without oneDNN, which on some processors copies half-precision operands into another layout: that is not ours to predict.
    """
    with _without_onednn(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        work()
    results: Any = recorder.profiler.kineto_results
    records = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    assert records, "torch's profiler has recorded no allocation"
    now = most = 0
    for _, change in records:
        now += change
        most = max(most, now)
    return most

"""An engine that is a guest in the training process, and what of the process stays the trainer's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

VARIABLES = ("LOCAL_WORLD_SIZE", "LD_PRELOAD")
"""Variables that vLLM sets for processes of its own, of which it has none here. The trainer's would inherit them."""


@contextmanager
def trainers_own(*, keep_group: bool) -> Iterator[None]:
    """Let vLLM start or end in this process without what it does to the process as a whole.

    It lowers the number of threads (on a CPU it also replaces the function that sets it) and sets the precision of float32
    products; when it ends it destroys the default process group. `keep_group`: that one is the trainer's.
    """
    setter, count = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    variables = {name: os.environ.get(name) for name in VARIABLES}
    destroy = dist.destroy_process_group

    def destroy_others(group: dist.ProcessGroup | None = None) -> None:
        if group is not None or not keep_group:
            destroy(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
        torch.set_num_threads = setter
        torch.set_num_threads(count)
        torch.set_float32_matmul_precision(precision)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

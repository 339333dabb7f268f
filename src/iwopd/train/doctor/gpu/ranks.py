"""Several processes that talk: NCCL between the GPUs of this machine, gloo on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from iwopd.train.doctor.findings import Finding, failure, passed
from iwopd.train.doctor.gpu.isolation import CHILD, run_together
from iwopd.train.doctor.gpu.wire import read_findings
from iwopd.train.ranks import Ranks

SECONDS = 300
NUMBERS = {"cuda": 2**24, "cpu": 2**16}
"""float32 numbers that are summed up over the ranks."""
CPU_RANKS = 2
REMEDY = (
    "run it again with NCCL_DEBUG=INFO to see where it stops; in a container start it with --ipc=host (or --shm-size=8g); try "
    "NCCL_P2P_DISABLE=1. One process on one GPU trains without it"
)


def check_ranks(device: str, count: int, folder: Path, seconds: float = SECONDS) -> Iterator[Finding]:
    """As many processes as GPUs, started as a training would be. `folder` is empty and for this check alone."""
    kind = device.partition(":")[0]
    commands = [[*CHILD, "ranks", kind, str(folder / f"found-{rank}.jsonl"), str(rank), str(count)] for rank in range(count)]
    own = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"} if kind == "cpu" else {}
    ended = run_together(commands, [own] * count, seconds=seconds, folder=folder)
    for rank in range(count):
        yield from read_findings(folder / f"found-{rank}.jsonl")
    if bad := [(rank, end) for rank, end in enumerate(ended) if end.code != 0]:
        # The first one that failed by itself; the others only waited for it.
        rank, end = next((pair for pair in bad if pair[1].code is not None), bad[0])
        yield failure("ranks", f"rank {rank} of {count} {end.how}", REMEDY, end.words)


def connect(device: torch.device, folder: Path, rank: int, count: int) -> Iterator[Finding]:
    """One of the processes: what a training run sends around, with the run's own code. Rank 0 tells."""
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count, timeout=limit)
    ranks = Ranks()
    found = {
        "gather of objects": ranks.gather({"rank": rank}) == [{"rank": other} for other in range(count)],
        "all-reduce": _all_reduce(device, rank, count),
        "reduce-scatter": _reduce_scatter(device, rank, count),
    }
    speed = _speed(device)
    ranks.leave(together=True)
    if dist.is_initialized():  # a group of one
        dist.destroy_process_group()
    wrong = [name for name, right in found.items() if not right]
    if wrong:
        yield failure("ranks", f"{backend}: {wrong[0]} gives wrong numbers on rank {rank} of {count}", REMEDY)
    elif rank == 0:
        words = f"{backend}: {', '.join(found)} between {count} processes"
        yield passed("ranks", f"{words}; all-reduce at {speed:.1f} GB/s" if backend == "nccl" and count > 1 else words)


def _all_reduce(device: torch.device, rank: int, count: int) -> bool:
    values = torch.arange(1024.0, device=device) * (rank + 1)
    dist.all_reduce(values)
    return torch.equal(values.cpu(), torch.arange(1024.0) * sum(range(1, count + 1)))


def _reduce_scatter(device: torch.device, rank: int, count: int) -> bool:
    """What sharded training does with gradients."""
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    mine = torch.empty(256, device=device)
    scatter(mine, torch.arange(256.0 * count, device=device))
    return torch.equal(mine.cpu(), count * torch.arange(256.0 * rank, 256.0 * (rank + 1)))


def _speed(device: torch.device) -> float:
    """GB a second and process of an all-reduce."""
    values = torch.ones(NUMBERS[device.type], device=device)
    dist.all_reduce(values)  # the first one also makes the connections
    began = time.perf_counter()
    dist.all_reduce(values)
    float(values[0])  # waits for the device
    return values.nbytes / 1e9 / max(1e-9, time.perf_counter() - began)

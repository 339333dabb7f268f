"""The adapter in a verl checkpoint as one file: `python -m iwopd.cluster.verl.adapter_shards ACTOR TARGET.safetensors`.

Every rank has saved its part of each matrix as a pickled DTensor. They are opened as weights only, which runs no code of
theirs, and in a process of their own. verl's own merger would round them to bfloat16 and load the whole model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

MARK = "lora_"


def adapter_tensors(actor: Path) -> dict[str, Tensor]:
    """The matrices, each whole, by their names in an adapter's file."""
    ranks = int(json.loads((actor / "fsdp_config.json").read_text(encoding="utf-8"))["world_size"])
    shards = [_read(actor / f"model_world_size_{ranks}_rank_{rank}.pt") for rank in range(ranks)]
    names = [name for name in shards[0] if MARK in name]
    return {name.replace(".default.", "."): _whole([shard[name] for shard in shards]) for name in names}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def _whole(parts: list[Any]) -> Tensor:
    first = parts[0]
    if not isinstance(first, DTensor):
        return first.detach().clone()  # type: ignore[no-any-return]  # every rank holds all of it
    *outer, inner = first.placements  # the last dimension of the mesh shards; the others, if any, hold copies
    if not all(placement.is_replicate() for placement in outer):
        raise ValueError(f"cannot put together a tensor that is placed as {first.placements}")
    if inner.is_replicate():
        return first.to_local().clone()
    count = first.device_mesh.shape[-1]
    dimension: int = inner.dim  # type: ignore[attr-defined]
    whole = torch.cat([part.to_local() for part in parts[:count]], dim=dimension)
    if whole.shape != first.shape:
        raise ValueError(f"the ranks' parts make {list(whole.shape)} of a tensor of {list(first.shape)}")
    return whole.contiguous()


if __name__ == "__main__":
    save_file(adapter_tensors(Path(sys.argv[1])), sys.argv[2], metadata={"format": "pt"})

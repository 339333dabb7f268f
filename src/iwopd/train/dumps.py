"""Batches kept for whoever wants to know what went wrong."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from iwopd.types import TokenBatch


def dump_skipped(folder: Path, batch: TokenBatch, columns: dict[str, Tensor], step: int) -> None:
    """Keep the batch of a skipped update: ids and lengths, and what the loss received of each token."""
    names = ("prompt_ids", "prompt_lengths", "response_ids", "lengths", "old_logprobs", "teacher_logprobs")
    tensors = {**{name: getattr(batch, name) for name in names}, **columns}
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / f"skipped-step-{step:06d}.safetensors")

"""Batches kept for whoever wants to know what went wrong."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from iwopd.types import TokenBatch


def dump_skipped(folder: Path, batch: TokenBatch, columns: dict[str, Tensor], step: int) -> None:
    """Keep the batch of a skipped update: ids and lengths, and what the loss received of each token."""
    tensors = {
        "prompt_ids": batch.prompt_ids,
        "prompt_lengths": batch.prompt_lengths,
        "response_ids": batch.response_ids,
        "lengths": batch.lengths,
        "old_logprobs": batch.old_logprobs,
        "teacher_logprobs": batch.teacher_logprobs,
        **columns,
    }
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / f"skipped-step-{step:06d}.safetensors")

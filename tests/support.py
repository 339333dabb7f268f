"""What several tests need: masks from lengths, random batches, and every weight rule with parameters to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RULES: list[tuple[str, dict[str, Any]]] = [
    ("uniform", {}),
    ("cumulative-share", {}),
    ("cumulative-share", {"gamma": 2.0, "total": "all"}),
    ("cumulative-share", {"blend": False}),
    ("signed", {}),
    ("signed", {"total": "all"}),
    ("ideal", {}),
    ("ideal", {"alpha": 1.0, "gamma": 0.5}),
    ("fixed-prefix", {}),
    ("linear-decay", {}),
    ("curriculum", {}),
    ("curriculum", {"schedule": "linear", "start": 0.1, "end": 0.9}),
    ("prefix-only", {}),
    ("suffix-only", {"ratio": 0.4}),
    ("survival", {}),
    ("survival", {"tau": 3.0, "floor": 0.2, "count": "all"}),
    ("until-drift", {"threshold": 1.0}),
    ("survival-share", {"tau": 3.0, "gamma": 2.0}),
    ("sod", {"tokens": 4}),
    ("rising", {}),
]
"""Every built-in rule that needs no more than log-probs, some with several settings."""


def length_mask(lengths: Sequence[int], width: int | None = None) -> Tensor:
    """Right-padded boolean mask [B, T]."""
    columns = torch.arange(max(lengths, default=0) if width is None else width)
    return columns[None] < torch.tensor(lengths, dtype=torch.long)[:, None]


def poison(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with NaN, infinities and huge numbers wherever the mask is false."""
    rubbish = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30], dtype=values.dtype)
    filler = rubbish[torch.arange(values.numel()) % 4].reshape(values.shape)
    return torch.where(mask, values, filler)


def random_batch(lengths: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Log-probs of a plausible batch, poisoned outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = length_mask(lengths)

    def logprobs(scale: float) -> Tensor:
        values = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * scale
        return poison(values.to(dtype), mask)

    return {
        "mask": mask,
        "old_logprobs": logprobs(2.0),
        "teacher_logprobs": logprobs(6.0),
        "reference_logprobs": logprobs(3.0),
        "logprobs": logprobs(2.0),
        "rollout_logprobs": logprobs(2.0),
    }

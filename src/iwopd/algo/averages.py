"""The exponential moving average of weights (mean teachers; Polyak and Ruppert's averaging with a horizon)."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def move_average(average: Tensor, weights: Tensor, decay: float) -> None:
    """`average <- decay * average + (1 - decay) * weights`, in place, in the average's precision.

    Both have any one shape. Weights that have not moved leave an average that equals them as it is, to the last bit. With
    decay 0 the average is the weights, with 1 it never moves.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must lie in [0, 1], got {decay}")
    average.lerp_(weights.to(average.device, average.dtype), 1 - decay)

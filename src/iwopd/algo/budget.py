"""Who gets the update: how many tokens a weighting leaves, and which part of the update a region of the response holds.

Both take sums over tokens: of a batch, a rollout or a bootstrap resample alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def effective_share(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """Kish's effective number of tokens as a share of all, `(sum w)^2 / (count * sum w^2)`; NaN where there is no weight.

    1 for equal weights; 0.3 if 30 % of the tokens share the weight equally and the rest has none. `total`, `squares` and
    `count` are the sums of w, of w^2 and of 1 over the valid tokens.
    """
    return torch.where(squares > 0, total.square() / (count * squares), torch.nan)


def region_share(inside: Tensor, total: Tensor) -> Tensor:
    """`sum_{t in region} |x[t]| / sum_t |x[t]|` from the two sums; NaN where there is nothing to share out.

    With x = a it is a region's part of the discrepancy; with x = w * A its part of the update, counting each token's gradient
    at `|w[t] A[t]|`, that is, taking the gradients of the log-probs themselves as equally long.
    """
    return torch.where(total > 0, inside / total, torch.nan)

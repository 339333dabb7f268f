"""Checks shared by the rooms of `algo/`: shapes, dtypes and finiteness, with errors that name the thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LOGPROB_FLOOR = -100.0
"""What a log-prob of -inf on a valid token counts as: bounded, and far below anything a model says by itself."""


class NonFiniteError(ValueError):
    """A number on a valid token that is NaN or infinite: the caller may want to skip the batch."""


class Checks:
    """Conditions on values, settled together: on an accelerator the host waits for every answer that it reads."""

    def __init__(self) -> None:
        self._bad: list[Tensor] = []
        self._errors: list[Callable[[], Exception]] = []

    def refuse(self, bad: Tensor, error: Callable[[], Exception]) -> None:
        """Raise what `error` returns if any of `bad` is true. It may be slow: nobody asks before it is needed."""
        self._bad.append(bad.any())
        self._errors.append(error)

    def tokens(self, name: str, values: Tensor, mask: Tensor, *, finite: bool = True) -> None:
        """Require per-token values of the mask's shape, in float32 or better and (by default) finite on valid tokens."""
        if values.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, the mask {list(mask.shape)}; they must be equal")
        if values.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {values.dtype}")
        bad = mask & (~torch.isfinite(values) if finite else torch.isnan(values))
        self.refuse(bad, lambda: _not_finite(name, values, bad))

    def settle(self) -> None:
        """Raise the error of the first condition that is not met."""
        if self._bad and bool(torch.stack(self._bad).any()):
            raise next(error for bad, error in zip(self._bad, self._errors, strict=True) if bool(bad))()


def _not_finite(name: str, values: Tensor, bad: Tensor) -> NonFiniteError:
    where = [int(i) for i in bad.nonzero()[0]]
    place = f"row {where[0]}, token {where[1]}" if len(where) == 2 else f"index {where}"
    return NonFiniteError(f"{name} is {values.detach()[tuple(where)].item()} at {place}, inside the mask")


def check_mask(mask: Tensor) -> None:
    """Require a boolean mask: an integer or float mask would multiply where we select, and let NaN through."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}; pass mask.bool()")


def check_batch_mask(mask: Tensor) -> None:
    """Require a boolean mask of shape [B, T]."""
    check_mask(mask)
    if mask.dim() != 2:
        raise ValueError(f"mask must have shape [B, T], got {list(mask.shape)}; add a batch dimension for one rollout")


def check_all(mask: Tensor, **tokens: Tensor) -> None:
    """`check_mask`, and `check_tokens` of each."""
    check_mask(mask)
    checks = Checks()
    for name, values in tokens.items():
        checks.tokens(name, values, mask)
    checks.settle()


def check_batch(mask: Tensor, **tokens: Tensor) -> None:
    """`check_batch_mask`, and `check_tokens` of each."""
    check_batch_mask(mask)
    check_all(mask, **tokens)


def check_tokens(name: str, values: Tensor, mask: Tensor, *, finite: bool = True) -> None:
    """`Checks.tokens` of one tensor."""
    checks = Checks()
    checks.tokens(name, values, mask, finite=finite)
    checks.settle()


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` on valid tokens, exactly 0 elsewhere, whatever stood there (NaN included)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Numbers [] on the CPU, read together: each copy by itself would make the host wait."""
    together = torch.stack([wide(value) for value in values.values()]).cpu()
    return {name: value.to(values[name].dtype) for name, value in zip(values, together, strict=True)}


def wide(values: Tensor) -> Tensor:
    """`values` in float64 for long sums (16,384 terms lose three digits in float32); float32 where a device has no double."""
    return values.float() if values.device.type == "mps" else values.double()

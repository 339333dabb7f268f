"""Which operations make the host wait for a CUDA device, and where our code asked for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import iwopd
from pretend_gpu.mixing import CPU_INDICES

OURS = str(Path(iwopd.__file__).parent) + "/"
PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
ALWAYS = {
    "_local_scalar_dense",  # item, float, int, bool
    "nonzero",
    "masked_select",
    "equal",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "histc",
}
"""Results that are read, or whose shape depends on the values."""


class Sync(NamedTuple):
    """One wait of the host for the device."""

    what: str
    """Operation; `upload` and `download` are copies."""
    place: str
    """File and line: the innermost ones of `src/iwopd`, relative to it; else of the caller outside torch."""
    by: str
    """Who asked: `iwopd`, or the package that our code called (`transformers`)."""


def sync_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What makes the host wait in this operation (`name` without overload), or None."""
    if name in ALWAYS:
        return name
    if name in CPU_INDICES and _by_mask(args, kwargs):
        return f"{name} with a mask"
    if name in CPU_INDICES and any(index is not None and index.device.type == "cpu" for index in args[1]):
        return f"{name} with indices of the host"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    if name == "isin" and isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.Tensor):
        elements, tested = args[0].numel(), args[1].numel()
        if tested >= 10 * elements**0.145 and not kwargs.get("assume_unique", False):
            return "isin by unique"
    return None


def _by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a mask must become indices. One value for all places is filled in without them."""
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    return masked and not (len(args) > 2 and args[2].numel() == 1 and not accumulate)


def sync_here(what: str) -> Sync:
    """A wait in the call that is under way in this thread."""
    frame: FrameType | None = sys._getframe(1)
    innermost = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*PASSED_OVER, "<")):
            innermost = innermost or f"{file}:{frame.f_lineno}"
        if file.startswith(OURS):
            return Sync(what, f"{file.removeprefix(OURS)}:{frame.f_lineno}", _package(innermost or file))
        frame = frame.f_back
    return Sync(what, innermost or "backward", _package(innermost or "backward"))


def _package(file: str) -> str:
    if file.startswith(OURS):
        return "iwopd"
    return file.partition("site-packages/")[2].partition("/")[0] or file.rpartition("/")[2]

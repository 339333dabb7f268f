"""Autocast on the pretend GPU: CUDA's lists of operations, read from the header that comes with torch.

Torch leaves a private device's lists to its maker. A matrix product runs in the lower precision, what loses digits there in
float32; lower-precision copies of weights are kept until the outermost block ends, as CUDA keeps them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretend_gpu import backend

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_OWN_KEY = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "AutocastPrivateUse1"))  # noqa: B009, mypy does not know it
_kept: dict[int, tuple[Tensor, Tensor]] = {}
"""Weights and their lower-precision copies, by the weight's identity."""


def register_autocast(aten: torch.library.Library) -> None:
    """Kernels for the device's autocast key."""
    policies = {"LOWER_PRECISION_FP": _lower, "FP32": _float32, "FP32_SET_OPT_DTYPE": _sums, "PROMOTE": _widest}
    for macro, policy in policies.items():
        for name in _listed(macro):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, functools.partial(_without_autocast, policy, op), "AutocastPrivateUse1")


@contextmanager
def keeps_copies() -> Iterator[None]:
    """Torch clears the copies that it keeps itself when the outermost block ends; ours go with them."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _kept.clear()
        clear()

    torch.clear_autocast_cache = clear_both
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear
        _kept.clear()


def _listed(macro: str) -> list[str]:
    text = HEADER.read_text()
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", text)
    assert body is not None, f"{HEADER} has no list AT_FORALL_{macro}"
    pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    assert pairs, f"the list AT_FORALL_{macro} of {HEADER} is not understood"
    return [f"{name}.{overload}" if overload else name for name, overload in pairs]


def _without_autocast(policy: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_OWN_KEY):
        return policy(op, args, kwargs)


def _lower(op: Any, args: Any, kwargs: Any) -> Any:
    return _cast_and_call(op, args, kwargs, torch.get_autocast_dtype(backend.NAME))


def _float32(op: Any, args: Any, kwargs: Any) -> Any:
    return _cast_and_call(op, args, kwargs, torch.float32)


def _sums(op: Any, args: Any, kwargs: Any) -> Any:
    """Sums and the like: the result is float32 unless the caller says otherwise."""
    names = [argument.name for argument in op._schema.arguments]
    given = kwargs.get("dtype", args[names.index("dtype")] if names.index("dtype") < len(args) else None)
    if given is None and _eligible(args[0]):
        place = names.index("dtype")
        if place < len(args):
            args = (*args[:place], torch.float32, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _widest(op: Any, args: Any, kwargs: Any) -> Any:
    dtypes = [tensor.dtype for tensor in _tensors([*args, *kwargs.values()]) if _eligible(tensor)]
    widest = functools.reduce(torch.promote_types, dtypes, torch.get_autocast_dtype(backend.NAME))
    return _cast_and_call(op, args, kwargs, widest)


def _cast_and_call(op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    return op(*(_cast(value, dtype) for value in args), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if not isinstance(value, Tensor) or not _eligible(value) or value.dtype == dtype:
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and dtype == torch.get_autocast_dtype(backend.NAME) and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if id(value) not in _kept:
        _kept[id(value)] = (value, value.to(dtype))
    return _kept[id(value)][1]


def _tensors(values: list[Any]) -> list[Tensor]:
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return [one for values in lists for one in values if isinstance(one, Tensor)]


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device == backend.DEVICE
        and value.is_floating_point()
        and value.dtype != torch.float64
    )

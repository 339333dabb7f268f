"""Registers the pretend GPU with torch: once in a process, for good."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

from pretend_gpu import backend
from pretend_gpu.autocast import register_autocast
from pretend_gpu.module import DeviceModule

FLASH = 1
"""What torch calls the fused attention kernel."""


class _Hook(_DummyPrivateUse1Hook):
    """Without an open device, other tests of the process see a machine without accelerator."""

    def is_available(self) -> bool:
        return backend.Open.memory is not None


@functools.cache
def register() -> tuple[Any, ...]:
    """Returns what must stay alive."""
    hook = _Hook()
    _setup_privateuseone_for_python_backend(backend.NAME, DeviceModule(), hook)
    backend.DEVICE = torch.device(backend.NAME, 0)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(backend.run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("copy_", backend.copy_, "PrivateUse1")
    for name in _made_by_out_variants():
        aten.impl(name, functools.partial(backend.run, _overload(name)), "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        aten.impl("scaled_dot_product_attention", _attention, key)
    register_autocast(aten)
    return hook, everything, aten


def _made_by_out_variants() -> list[str]:
    """Operations that torch would compose of an allocation and an `out=` variant: one call is quicker."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name for name in names if has(name, "CompositeExplicitAutogradNonFunctional") and has(name, "CPU")]


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that the CPU would choose. Left to itself, torch would write out [T, T] probabilities on a private device."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    choose: Any = torch._fused_sdp_choice
    choice = choose(*(backend.lower(one) for one in (query, key, value, attn_mask)), dropout_p, is_causal, **options)
    if choice != FLASH:
        math: Any = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]

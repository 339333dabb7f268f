"""The pretend GPU as torch sees it: a private-use device whose operations run on the CPU.

A tensor of the device is an ordinary `torch.Tensor` over a storage without memory. The storage's Python object, which torch
keeps as long as the storage itself, holds the CPU storage with the numbers (`buffer`) and its entry in the ledger. Every
operation below autograd and autocast arrives in `run`: it computes on CPU tensors over those buffers. Results are new tensors
of the device, or views where the CPU's result is a view.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from pretend_gpu.ledger import Ledger
from pretend_gpu.mixing import refuse_mixed
from pretend_gpu.syncs import Sync, sync_here, sync_of

NAME = "pretend"
DEVICE = torch.device("cpu")  # until `register`
_CPU = DispatchKeySet(DispatchKey.CPU)
_as_strided: Any = torch.ops.aten.as_strided.default
_set: Any = torch.ops.aten.set_.source_Storage_storage_offset


class Open:
    """The device that is open: there is one at a time."""

    memory: Ledger | None = None
    syncs: list[Sync]
    random: Tensor
    """State of the device's random numbers."""


class _Raw(Tensor):
    """Only torch's constructor of tensors without memory wants a class like this; `_lift` goes on with a plain view."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} reached a tensor that nobody should hold")


def ledger() -> Ledger:
    if Open.memory is None:
        raise RuntimeError("a tensor of the pretend GPU is used outside of `with pretend_gpu()`")
    return Open.memory


def note_sync(what: str) -> None:
    Open.syncs.append(sync_here(what))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation with a tensor of the device among its arguments, or that makes one."""
    about = _about(op)
    refuse_mixed(op, about.name, args, kwargs, DEVICE)
    if (waits := sync_of(about.name, args, kwargs)) is not None:
        note_sync(waits)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    sources: dict[int, Tensor] = {}
    with torch._C._AutoDispatchBelowAutograd():
        result = _call(op, about, [lower(value, sources) for value in args], {k: lower(v, sources) for k, v in kwargs.items()})
    if isinstance(result, (list, tuple)):
        places = about.written if len(about.written) == len(result) else [None] * len(result)
        return type(result)(_result(value, place, args, kwargs, sources) for value, place in zip(result, places, strict=True))
    return _result(result, about.written[0] if about.written else None, args, kwargs, sources)


def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices, too. A copy to the host waits, and so does one from it unless told not to."""
    if to.device != source.device and source.device == DEVICE:
        note_sync("download")
    elif to.device != source.device and not non_blocking:
        note_sync("upload")
    with torch._C._AutoDispatchBelowAutograd():
        lower(to).copy_(lower(source))
    return to


def lower(value: Any, sources: dict[int, Tensor] | None = None) -> Any:
    """The CPU tensor over the same numbers; `sources` learns whose they are."""
    if isinstance(value, Tensor):
        if value.device != DEVICE:
            return value
        ledger()
        buffer = value.untyped_storage().buffer  # type: ignore[attr-defined]
        if sources is not None:
            sources[buffer._cdata] = value
        return torch.empty(0, dtype=value.dtype).set_(buffer, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return type(value)(lower(item, sources) for item in value)
    return value


@dataclass(frozen=True)
class _About:
    """What the schema of an operation says."""

    name: str
    """Without overload."""
    tensors: list[int]
    """Which positional arguments are tensors."""
    written: list[str | int | None]
    """Of each result: the argument that it is, if the operation writes into it."""
    draws: bool
    """It draws random numbers."""


@functools.cache
def _about(op: Any) -> _About:
    schema = op._schema
    tensors = [place for place, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"]
    letters: dict[str, str | int] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            letters |= dict.fromkeys(argument.alias_info.before_set, argument.name if argument.kwarg_only else place)
    results = [set() if result.alias_info is None else result.alias_info.before_set for result in schema.returns]
    written = [next((place for letter, place in letters.items() if letter in own), None) for own in results]
    return _About(schema.name.removeprefix("aten::"), tensors, written, torch.Tag.nondeterministic_seeded in op.tags)


def _call(op: Any, about: _About, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(args[place], (bool, int, float, complex)) for place in about.tensors if place < len(args)):
        op = op.overloadpacket  # `x | 1` arrives as the overload for two tensors, with the number as it was
    if not about.draws or kwargs.get("generator") is not None:
        return op(*args, **kwargs)
    host = torch.get_rng_state()
    torch.set_rng_state(Open.random)
    try:
        return op(*args, **kwargs)
    finally:
        Open.random = torch.get_rng_state()
        torch.set_rng_state(host)


def _result(value: Any, place: str | int | None, args: Any, kwargs: Any, sources: dict[int, Tensor]) -> Any:
    """What the caller gets: the argument that was written, a list, a tensor of the device, or a number."""
    if place is not None:
        own = kwargs[place] if isinstance(place, str) else args[place]
        if isinstance(own, Tensor) and own.shape != value.shape:
            resized = _lift(value, {})
            _set.redispatch(_CPU, own, resized.untyped_storage(), 0, resized.shape, resized.stride())
        return own
    if isinstance(value, (list, tuple)):
        return type(value)(_lift(item, sources) for item in value)
    return _lift(value, sources)


def _lift(value: Any, sources: dict[int, Tensor]) -> Any:
    """A tensor of the device over the numbers of a CPU tensor."""
    if not isinstance(value, Tensor):
        return value
    buffer = value.untyped_storage()
    base: Any = sources.get(buffer._cdata)
    if base is None or base.dtype != value.dtype:
        size = buffer.nbytes()
        books = ledger()
        block = books.allocate(size)
        base = _Raw._make_wrapper_subclass(_Raw, (size // value.itemsize,), dtype=value.dtype, device=DEVICE, storage_size=size)
        storage = base.untyped_storage()
        storage.buffer = buffer
        weakref.finalize(storage, books.release, block).atexit = False
    return _as_strided.redispatch(_CPU, base, value.shape, value.stride(), value.storage_offset())

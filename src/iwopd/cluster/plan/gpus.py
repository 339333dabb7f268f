"""GPUs by name, with the figures of public data sheets. docs/plan.md names the source of each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from iwopd.errors import UserError


class PlanError(UserError, ValueError):
    """A plan that cannot be made, and what to do."""


@dataclass(frozen=True)
class Gpu:
    """What a data sheet says of a GPU. Rates are peaks: what is reached of them is in `rates`."""

    name: str
    title: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 matrix products, FLOP/s (not the doubled figure with sparsity)."""
    bandwidth: float
    """Of the memory, bytes/s."""
    link: float
    """To GPUs of the same machine, bytes/s in one direction: half of the figure that is advertised."""
    network: float
    """To GPUs of other machines, bytes/s in one direction, for each GPU."""


GPUS = {
    gpu.name: gpu
    for gpu in (  # memory, FLOP/s, bandwidth, link, network
        Gpu("a100-40", "A100 SXM 40 GB", 40e9, 312e12, 1.555e12, 300e9, 25e9),
        Gpu("a100-80", "A100 SXM 80 GB", 80e9, 312e12, 2.039e12, 300e9, 25e9),
        Gpu("h100", "H100 SXM 80 GB", 80e9, 989.4e12, 3.35e12, 450e9, 50e9),
        Gpu("h200", "H200 SXM 141 GB", 141e9, 989.4e12, 4.8e12, 450e9, 50e9),
        Gpu("b200", "B200 SXM 180 GB", 180e9, 2250e12, 8.0e12, 900e9, 50e9),
        Gpu("l40s", "L40S 48 GB", 48e9, 362.05e12, 0.864e12, 32e9, 12.5e9),
        Gpu("rtx4090", "RTX 4090 24 GB", 24e9, 165.2e12, 1.008e12, 32e9, 12.5e9),
    )
}


def find_gpu(name: str) -> Gpu:
    """By name, in any case, with or without hyphens; `a100` is the one with 80 GB."""
    plain = {key.replace("-", ""): gpu for key, gpu in GPUS.items()} | {"a100": GPUS["a100-80"], "4090": GPUS["rtx4090"]}
    gpu = plain.get("".join(letter for letter in name.lower() if letter.isalnum()))
    if gpu is None:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(f"--gpu {name}: there is no such GPU in the table; {hint}Known: {', '.join(GPUS)}")
    return gpu

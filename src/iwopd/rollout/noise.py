"""Sampling noise without a state: one uniform number for each (seed, step, prompt, sample, position).

A generator that is drawn from in batch order ties every rollout to its neighbours. Here the number is a function of its
coordinates alone, so a rollout comes out the same in any batch, at any batch size, and after a resume.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

# The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, in Stafford's
# variant 13), as signed 64-bit numbers: torch multiplies int64 modulo 2^64.
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def stream_key(seed: int, step: int, prompt_id: str, sample: int) -> tuple[int, int]:
    """The 128-bit name of one rollout's noise, as two signed 64-bit numbers. The same on every machine and every run."""
    name = f"{seed}:{step}:{sample}:{prompt_id}".encode(errors="surrogatepass")
    digest = blake2b(name, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """[N] float64 in [0, 1): number `positions[i]` (from 0) of the stream `keys[i]`, with all of a double's 53 bits.

    `keys` is [N, 2] int64, `positions` [N] int64. A stream starts at its first half and goes on in steps of its second
    half (made odd, so that it comes back only after 2^64 numbers), each place mixed by SplitMix64.
    """
    state = keys[:, 0] + (positions + 1) * (keys[:, 1] | 1)
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 has only the arithmetic one, which drags the sign along."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)

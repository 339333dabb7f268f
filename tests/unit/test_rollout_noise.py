"""Sampling noise: the same everywhere, uniform, and different wherever a coordinate differs."""

from __future__ import annotations

from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iwopd.rollout.noise import stream_key, uniforms


def plain_uniform(seed: int, step: int, prompt_id: str, sample: int, position: int) -> float:
    """The definition, in Python's unbounded integers."""
    word = 2**64
    digest = blake2b(f"{seed}:{step}:{sample}:{prompt_id}".encode(), digest_size=16).digest()
    start, stride = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
    z = (start + (position + 1) * stride) % word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % word
    z = z ^ (z >> 31)
    return (z >> 11) / 2**53


@given(st.integers(-(2**40), 2**40), st.integers(0, 10**6), st.text(max_size=20), st.integers(0, 99), st.integers(0, 10**5))
def test_matches_the_definition(seed: int, step: int, prompt_id: str, sample: int, position: int) -> None:
    keys = torch.tensor([stream_key(seed, step, prompt_id, sample)])
    assert uniforms(keys, torch.tensor([position])).item() == plain_uniform(seed, step, prompt_id, sample, position)


def test_numbers_are_pinned() -> None:
    """A change here changes every seeded run that anybody has made."""
    keys = torch.tensor([stream_key(0, 1, "prompt-7", 0)] * 3)
    assert uniforms(keys, torch.tensor([0, 1, 1000])).tolist() == [0.7983432308404345, 0.9541242978587259, 0.7905817196652276]


def test_every_coordinate_matters() -> None:
    base = (1, 11, "a", 0)
    others = [
        (11, 1, "a", 0),
        (1, 12, "a", 0),
        (1, 11, "b", 0),
        (1, 11, "a", 1),
        (2, 11, "a", 0),
        (1, 11, "0:a", 0),
        (1, 110, "a", 0),
    ]
    keys = [stream_key(*names) for names in (base, *others)]
    assert len(set(keys)) == len(keys)
    numbers = uniforms(torch.tensor(keys), torch.zeros(len(keys), dtype=torch.long))
    assert len(set(numbers.tolist())) == len(keys)


@pytest.mark.parametrize("along", ["positions", "streams", "samples"])
def test_uniform_and_uncorrelated(along: str) -> None:
    count = 40_000
    if along == "positions":
        keys = torch.tensor([stream_key(0, 0, "p", 0)]).expand(count, 2)
        numbers = uniforms(keys, torch.arange(count))
    elif along == "streams":
        keys = torch.tensor([stream_key(0, 0, str(i), 0) for i in range(count)])
        numbers = uniforms(keys, torch.zeros(count, dtype=torch.long))
    else:
        keys = torch.tensor([stream_key(0, 0, "p", i) for i in range(count)])
        numbers = uniforms(keys, torch.full((count,), 5))
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    observed = torch.histc(numbers, 100, 0, 1)
    chi_square = float(((observed - count / 100) ** 2 / (count / 100)).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: 1e-4 on either side
    centred = numbers - 0.5
    serial = float((centred[1:] * centred[:-1]).mean() * 12)
    assert abs(serial) < 4 / count**0.5

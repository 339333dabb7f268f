"""From logits to ids: the inverse of the cumulative distribution, top-k and top-p against plain references."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from iwopd.rollout import sampling
from iwopd.rollout.noise import stream_key, uniforms
from iwopd.rollout.sampling import SamplingSettings, choose, restrict

LAST = 1 - 2**-53
"""The largest number that the noise can give."""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be an integer >= 1, got 0"),
        ("max_tokens", 1.5, "max_tokens"),
        ("temperature", -1.0, "temperature must be >= 0"),
        ("temperature", math.nan, "temperature"),
        ("temperature", math.inf, "temperature"),
        ("top_p", 0.0, "top_p must lie in"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -1, "top_k"),
        ("top_k", True, "top_k"),
        ("stop_ids", (-1,), "stop_ids"),
        ("stop_ids", ("2",), "stop_ids"),
    ],
)
def test_settings_are_checked(field: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {"max_tokens": 8, field: value}
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**arguments)


@pytest.mark.parametrize("stops", [2, "2", b"2"])
def test_one_stop_id_is_no_set(stops: Any) -> None:
    with pytest.raises(TypeError, match="stop_ids must be a set of ids"):
        SamplingSettings(8, stop_ids=stops)


def test_stop_ids_become_a_set() -> None:
    assert SamplingSettings(8, stop_ids=[3, 1, 3]).stop_ids == frozenset({1, 3})
    assert hash(SamplingSettings(8, stop_ids=(1, 3))) == hash(SamplingSettings(8, stop_ids=(3, 1)))


def test_inverse_of_a_known_distribution() -> None:
    logits = torch.tensor([0.125, 0.25, 0.5, 0.125]).log()
    numbers = torch.tensor([0.0, 0.124, 0.126, 0.374, 0.376, 0.874, 0.876, LAST], dtype=torch.float64)
    chosen = choose(logits.expand(8, 4), numbers, SamplingSettings(8))
    assert chosen.ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(chosen.logprobs, logits[chosen.ids])


@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([0.3, 1.0, 1.7]))
def test_inverse_matches_a_plain_search(seed: int, size: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, size, generator=generator) * 3
    numbers = torch.rand(5, generator=generator, dtype=torch.float64)
    chosen = choose(logits, numbers, SamplingSettings(8, temperature=temperature))
    for row in range(5):
        probs = (logits[row] / temperature).softmax(-1).tolist()
        sums = list(accumulate(probs))
        assert int(chosen.ids[row]) == bisect_right(sums, float(numbers[row]) * sums[-1])
    expected = (logits / temperature).log_softmax(-1).gather(1, chosen.ids[:, None]).squeeze(1)
    torch.testing.assert_close(chosen.logprobs, expected, atol=2e-6, rtol=1e-6)
    assert chosen.logprobs.dtype == torch.float32


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies(temperature: float) -> None:
    """Chi-square of 40,000 draws with the real noise."""
    count = 40_000
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -1.0, 0.0, 0.7, -2.0])
    keys = torch.tensor([stream_key(3, 1, f"p{i % 200}", i // 200) for i in range(count)])
    chosen = choose(logits.expand(count, 8), uniforms(keys, torch.full((count,), 2)), SamplingSettings(8, temperature))
    expected = (logits / temperature).softmax(-1) * count
    chi_square = float(((chosen.ids.bincount(minlength=8) - expected) ** 2 / expected).sum())
    assert 0.2 < chi_square < 29  # 7 degrees of freedom: 1e-4 on either side


@pytest.mark.parametrize("size", [5, 3000])
def test_ids_of_probability_zero_are_never_drawn(size: int) -> None:
    logits = torch.full((3, size), float("-inf"))
    logits[0, 2] = 0.0
    logits[1, [1, 3]] = 0.0
    logits[2, [0, size - 1]] = torch.tensor([0.0, -200.0])  # underflows to 0
    for number, expected in ((0.0, [2, 1, 0]), (LAST, [2, 3, 0])):
        chosen = choose(logits, torch.full((3,), number, dtype=torch.float64), SamplingSettings(8))
        assert chosen.ids.tolist() == expected
        assert bool(torch.isfinite(chosen.logprobs).all())


def test_largest_number_stays_inside_for_any_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 50, generator=generator) * 5
    chosen = choose(logits, torch.full((2000,), LAST, dtype=torch.float64), SamplingSettings(8, top_k=7))
    assert int(chosen.ids.max()) < 50
    assert bool((chosen.logprobs > -60).all())


def plain_restrict(probs: list[float], top_k: int, top_p: float) -> list[float]:
    """Walk down the ids from the likeliest; ties with the last one stay."""
    falling = sorted(probs, reverse=True)
    if top_k:
        border = falling[min(top_k, len(falling)) - 1]
        probs = [p if p >= border else 0.0 for p in probs]
        falling = sorted(probs, reverse=True)
    if top_p < 1:
        target, mass = math.fsum(probs) * top_p, 0.0
        for p in falling:
            mass += p
            if mass >= target:
                border = p
                break
        probs = [p if p >= border else 0.0 for p in probs]
    return probs


@settings(max_examples=200)
@given(
    st.integers(0, 2**31), st.integers(1, 30), st.integers(0, 35), st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]), st.booleans()
)
def test_restrict_matches_the_plain_reference(seed: int, size: int, top_k: int, top_p: float, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    if ties:  # eighths: exact sums, many equal
        probs = torch.randint(0, 4, (1, size), generator=generator).float() / 8
        probs[0, 0] += 0.125
    else:
        probs = (torch.randn(1, size, generator=generator) * 2).softmax(-1)
    assert restrict(probs, top_k, top_p)[0].tolist() == plain_restrict(probs[0].tolist(), top_k, top_p)


def test_top_p_beyond_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows need more ids than the candidates; peaked rows beside them do not."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 500, generator=generator) * torch.tensor([[0.1], [8.0], [1.0], [0.0]])
    probs = logits.softmax(-1)
    monkeypatch.setattr(sampling, "TOP_P_CANDIDATES", 32)
    for row, kept in zip(probs, restrict(probs, 0, 0.9), strict=True):
        assert kept.tolist() == plain_restrict(row.tolist(), 0, 0.9)


def test_restricted_draws_keep_full_logprobs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(200, 4)
    numbers = torch.linspace(0, LAST, 200, dtype=torch.float64)
    for options in ({"top_k": 2}, {"top_p": 0.8}):
        chosen = choose(logits, numbers, SamplingSettings(8, **options))  # type: ignore[arg-type]
        assert set(chosen.ids.tolist()) == {0, 1}
        share = float((chosen.ids == 0).float().mean())
        assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.01)  # renormalised over the two
        torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1)[0, chosen.ids])


def test_greedy() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    chosen = choose(logits, None, SamplingSettings(8, temperature=0))
    assert chosen.ids.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1).max(-1).values)
    with pytest.raises(ValueError, match="needs uniform numbers"):
        choose(logits, None, SamplingSettings(8))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}, {"temperature": 0.0}])
def test_chunks_of_rows_change_nothing(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(23, 40, generator=generator)
    numbers: Tensor = torch.rand(23, generator=generator, dtype=torch.float64)
    how = SamplingSettings(8, **options)  # type: ignore[arg-type]
    whole = choose(logits, numbers, how)
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 200)
    pieces = choose(logits, numbers, how)
    assert pieces.ids.tolist() == whole.ids.tolist()
    assert pieces.logprobs.tolist() == whole.logprobs.tolist()

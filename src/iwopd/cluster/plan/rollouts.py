"""How long the rollouts of a step take: answers of assumed lengths, decoded together until the last one ends."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

from iwopd.cluster.plan.gpus import Gpu
from iwopd.cluster.plan.rates import Rates
from iwopd.cluster.plan.work import decode_bytes, decode_flops
from iwopd.train.memory import ModelShape


def answer_lengths(count: int, mean: float, most: int, *, everyone: int | None = None) -> list[int]:
    """Lengths of `count` answers, in an order that has nothing to do with length, but that the longest is in the middle.

    They end at a constant rate (an exponential), cut off at `most`, with this mean: many short ones, a long tail. The last
    is the longest of `everyone`, because a step waits for the longest answer wherever it is written.
    """
    rate = _rate(mean, most)
    levels = [(place + 0.5) / count for place in range(count)]
    levels[-1] = 1 - 0.5 / (everyone or count)
    lengths = [max(1, min(most, round(-math.log(1 - level) / rate if rate else most))) for level in levels]
    return _shuffled(lengths)


def measured_lengths(count: int, quantiles: Sequence[float], *, everyone: int | None = None) -> list[int]:
    """The same from quantiles at even levels from 0 to 1, as a probe has them: straight lines between them."""
    levels = [(place + 0.5) / count for place in range(count)]
    levels[-1] = 1 - 0.5 / (everyone or count)
    last = len(quantiles) - 1
    lengths = []
    for level in levels:
        left = min(int(level * last), last - 1)
        part = level * last - left
        lengths.append(max(1, round((1 - part) * quantiles[left] + part * quantiles[left + 1])))
    return _shuffled(lengths)


def _shuffled(lengths: list[int]) -> list[int]:
    """From short to long before; the longest in the middle, where it is on average: when it begins decides when a step ends."""
    longest = lengths.pop()
    random.Random("answers").shuffle(lengths)
    lengths.insert(len(lengths) // 2, longest)
    return lengths


def _rate(mean: float, most: int) -> float:
    """Rate of the exponential whose mean, cut off at `most`, is `mean`; 0 where all are cut off."""
    if mean >= most * (1 - 1e-6):
        return 0.0
    low, high = 1e-12, 1.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if -math.expm1(-middle * most) / middle > mean else (low, middle)
    return math.sqrt(low * high)


def step_seconds(
    model: ModelShape, gpu: Gpu, rates: Rates, shards: int, rows: int, context: float, number_bytes: float = 2
) -> float:
    """One decoding step of `rows` rows with `context` tokens in their caches, on `shards` GPUs."""
    read = decode_bytes(model, rows, context, number_bytes, number_bytes)
    reading = read / (shards * gpu.bandwidth * rates.decode_bandwidth)
    computing = decode_flops(model, rows, context) / (shards * gpu.flops * rates.decode_flops)
    exchange = 2 * model.layers * rates.exchange_seconds if shards > 1 else 0.0
    return max(reading, computing) + model.layers * rates.layer_seconds + rows * rates.row_seconds + exchange


def decode_seconds(
    model: ModelShape,
    gpu: Gpu,
    rates: Rates,
    *,
    shards: int,
    lengths: Sequence[int],
    prompt: int,
    most_rows: int,
    number_bytes: float = 2,
) -> float:
    """Answers of these lengths on one engine with at most `most_rows` under way; a free place is taken at once.

    number_bytes: of a number in weights and cache.
    """
    waiting = list(reversed(lengths))
    ends: list[tuple[int, int]] = []  # (step at which a row ends, step at which it began)
    seconds, now, context = 0.0, 0, 0
    while waiting or ends:
        while waiting and len(ends) < most_rows:
            heapq.heappush(ends, (now + waiting.pop(), now))
            context += prompt
        until = ends[0][0]
        rows, steps = len(ends), until - now
        if steps:
            seconds += steps * step_seconds(model, gpu, rates, shards, rows, context + rows * steps / 2, number_bytes)
        context += rows * steps
        now = until
        while ends and ends[0][0] == now:
            _, began = heapq.heappop(ends)
            context -= prompt + now - began
    return seconds

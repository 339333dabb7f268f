"""What K samples of a problem are worth: metrics from scores [N, K] to values [N]. `eval.statistics` goes on from there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

EXACT_VOTES = 2**14
"""Up to this K * k, majority@k is exact; beyond, it is resampled."""
VOTES = 4000
"""Draws where it is resampled."""

Answers = Sequence[Sequence[str | None]]


def mean_at(scores: Tensor) -> Tensor:
    """mean@K of each problem [N]: the chance that one sample is right. Its expectation does not depend on K."""
    check_scores(scores, 1)
    return scores.double().mean(1)


def best_at(scores: Tensor, k: int) -> Tensor:
    """best@k of each problem [N]: the expected best score among k of the K samples, drawn without replacement.

    Unbiased for any k <= K, also for scores between 0 and 1; for scores of 0 and 1 it is pass@k.
    """
    check_scores(scores, k)
    samples = scores.shape[1]
    ranks = torch.arange(k, samples, dtype=torch.float64)  # C(rank - 1, k - 1) / C(K, k) for rank = K, K-1, ..., k
    steps = torch.cat([torch.tensor([k / samples], dtype=torch.float64), ((ranks + 1 - k) / ranks).flip(0)])
    return scores.double().sort(1, descending=True).values[:, : len(steps)] @ steps.log().cumsum(0).exp()


def pass_at(scores: Tensor, k: int) -> Tensor:
    """pass@k of each problem [N], unbiased (Chen et al. 2021): 1 - C(K - c, k) / C(K, k) with c right samples of K.

    As a sum of logarithms, so it neither overflows nor cancels for thousands of samples.
    """
    check_scores(scores, k)
    if not ((scores == 0) | (scores == 1)).all():
        raise ValueError("pass@k is for scores of 0 and 1; best@k takes scores in between, too")
    samples = scores.shape[1]
    wrong = (scores == 0).sum(1)  # [N]
    factors = torch.log1p(-k / torch.arange(k + 1, samples + 1, dtype=torch.float64))
    logs = torch.cat([factors.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)])  # entry i: from i + k on
    return torch.where(wrong < k, 1.0, -torch.expm1(logs[(wrong - k).clamp(min=0)]))


def majority_at(scores: Tensor, answers: Answers, k: int | None = None, *, seed: int = 0) -> Tensor:
    """majority@k of each problem [N]: the expected score of the commonest answer among k of the K samples (default: all K).

    `answers` [N][K] are canonical answer classes; None (nothing could be read) does not vote, and no votes at all score 0. Ties
    are broken at random, in expectation. Exact for k = K and for K * k up to 2^14 (a sum over the multivariate
    hypergeometric distribution of the votes), else the mean of 4000 seeded draws.
    """
    k = scores.shape[-1] if k is None else k
    check_scores(scores, k)
    if len(answers) != len(scores) or any(len(row) != scores.shape[1] for row in answers):
        raise ValueError(f"majority@k needs answers of the scores' shape {list(scores.shape)}")
    generator = torch.Generator().manual_seed(seed)
    rows = [_expected_vote(row, list(given), k, generator) for row, given in zip(scores.tolist(), answers, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


def _expected_vote(scores: list[float], answers: list[str | None], k: int, generator: torch.Generator) -> float:
    sizes = Counter(answer for answer in answers if answer is not None)
    # A class whose samples were judged differently (an inconsistent checker) is worth what a random member is worth.
    worth = {name: sum(s for s, a in zip(scores, answers, strict=True) if a == name) / size for name, size in sizes.items()}
    if not sizes or not any(worth.values()):
        return 0.0
    if k == len(scores):
        winners = [name for name, size in sizes.items() if size == max(sizes.values())]
        return sum(worth[name] for name in winners) / len(winners)
    if len(scores) * k > EXACT_VOTES:
        return _sampled_vote(worth, answers, k, generator)
    silent = len(answers) - sizes.total()
    chances = {
        name: _chance_to_win(size, [sizes[other] for other in sizes if other != name], silent, k)
        for name, size in sizes.items()
        if worth[name]
    }
    return sum(worth[name] * chance for name, chance in chances.items())


def _chance_to_win(size: int, others: list[int], silent: int, k: int) -> float:
    """Chance that a class of `size` wins the vote of k draws, ties broken at random."""
    ways = 0.0
    for votes in range(1, min(size, k) + 1):
        room = k - votes
        table = torch.zeros(room // votes + 1, room + 1, dtype=torch.float64)  # [tied classes, draws used]: ways
        table[0, 0] = 1.0
        for other in others:
            after = torch.zeros_like(table)
            for drawn in range(min(other, votes, room) + 1):
                tied, count = (1 if drawn == votes else 0), float(math.comb(other, drawn))
                after[tied:, drawn:] += count * table[: len(table) - tied, : room + 1 - drawn]
            table = after
        rest = torch.tensor([float(math.comb(silent, room - used)) for used in range(room + 1)], dtype=torch.float64)
        shares = 1.0 / torch.arange(1, len(table) + 1, dtype=torch.float64)
        ways += math.comb(size, votes) * float(shares @ table @ rest)
    return ways / math.comb(size + sum(others) + silent, k)


def _sampled_vote(worth: dict[str, float], answers: list[str | None], k: int, generator: torch.Generator) -> float:
    names = list(worth)
    members = torch.tensor([[answer == name for name in names] for answer in answers], dtype=torch.float64)  # [K, classes]
    values = torch.tensor([worth[name] for name in names], dtype=torch.float64)
    total = 0.0
    for _ in range(VOTES):
        votes = members[torch.randperm(len(answers), generator=generator)[:k]].sum(0)
        if votes.max() > 0:
            total += float(values[votes == votes.max()].mean())
    return total / VOTES


def check_scores(scores: Tensor, k: int) -> None:
    if scores.dim() != 2 or scores.numel() == 0:
        raise ValueError(f"scores must be [problems, samples] and not empty, got {list(scores.shape)}")
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"k = {k} is not possible with {scores.shape[1]} samples per problem: choose 1 to {scores.shape[1]}")

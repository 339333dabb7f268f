"""The hand-off curve (Fig. 1b): the student begins an answer, the teacher finishes it. How often is it right?

Equal work is done once: a prefix is read once for all its continuations, and prefixes that two fractions share (short answers)
are one. All fractions of a group of rollouts go to the sampler in one call, so that finished rows make room for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from iwopd.eval.answers import answer_text, check_answers
from iwopd.eval.task import Checker
from iwopd.rollout.sampler import Sampler
from iwopd.types import Prompt, Rollout

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
GROUP = 32
"""Rollouts whose continuations are sampled in one call: enough to fill a batch, few enough to show progress."""


def handoff_scores(
    rollouts: Sequence[Rollout],
    teacher: Sampler,
    tokenizer: Any,
    check: Checker,
    *,
    fractions: Sequence[float] = FRACTIONS,
    continuations: int = 1,
    seed: int = 0,
    group: int = GROUP,
    advance: Callable[[int], None] = lambda rollouts: None,
) -> dict[float, Tensor]:
    """Scores [N, continuations] of the teacher's continuations of the first part of each rollout, for every fraction.

    A prefix has `ceil(fraction * T)` tokens, as everywhere in the method. The continuation may be as long as a whole answer:
    only the teacher's context cuts it off, never the student's verbosity. A prefix that is the whole answer, end included, is
    not continued: it counts as it is. `advance` hears how many rollouts are done.
    """
    scores: dict[float, list[list[float]]] = {fraction: [] for fraction in fractions}
    for start in range(0, len(rollouts), group):
        part = rollouts[start : start + group]
        texts = _continue(part, teacher, tokenizer, fractions, continuations, seed)
        prompts = [rollout.prompt for rollout, rows in zip(part, texts, strict=True) for _ in rows]
        found = iter(check_answers(check, prompts, [text for rows in texts for text in rows]))
        for rollout in part:
            by_length = {length: [next(found).score for _ in range(continuations)] for length in _lengths(rollout, fractions)}
            for fraction in fractions:
                scores[fraction].append(by_length[prefix_length(fraction, len(rollout))])
        advance(len(part))
    return {fraction: torch.tensor(rows, dtype=torch.float64).reshape(-1, continuations) for fraction, rows in scores.items()}


def prefix_length(fraction: float, tokens: int) -> int:
    """`ceil(fraction * T)`, exact for the decimal that was written."""
    return math.ceil(Fraction(str(fraction)) * tokens)


def _lengths(rollout: Rollout, fractions: Sequence[float]) -> list[int]:
    return list(dict.fromkeys(prefix_length(fraction, len(rollout)) for fraction in fractions))


def _continue(
    rollouts: Sequence[Rollout], teacher: Sampler, tokenizer: Any, fractions: Sequence[float], continuations: int, seed: int
) -> list[list[str]]:
    """Whole answers of each rollout: all continuations of its first prefix length, then of its second, ..."""
    prefixes = [(row, length) for row, rollout in enumerate(rollouts) for length in _lengths(rollout, fractions)]
    open_ended = [(row, length) for row, length in prefixes if not _complete(rollouts[row], length)]
    prompts = [_prefixed(rollouts[row], length) for row, length in open_ended]
    limits = [min(teacher.settings.max_tokens, max(1, teacher.context - len(prompt.token_ids))) for prompt in prompts]
    written = iter(teacher.sample(prompts, seed=seed, step=0, samples=continuations, max_tokens=limits))
    texts: list[list[str]] = [[] for _ in rollouts]
    for row, length in prefixes:
        prefix = rollouts[row].response_ids[:length]
        if _complete(rollouts[row], length):
            texts[row] += [answer_text(tokenizer, prefix)] * continuations
        else:
            whole = (torch.cat([prefix, next(written).response_ids]) for _ in range(continuations))
            texts[row] += [answer_text(tokenizer, ids) for ids in whole]
    return texts


def _prefixed(rollout: Rollout, length: int) -> Prompt:
    """The prompt with the rollout's beginning; its noise is the same for every length."""
    ids = (*rollout.prompt.token_ids, *rollout.response_ids[:length].tolist())
    return replace(rollout.prompt, id=f"{rollout.prompt.id}@{rollout.sample}", token_ids=ids)


def _complete(rollout: Rollout, length: int) -> bool:
    return rollout.stop_reason == "eos" and length >= len(rollout)

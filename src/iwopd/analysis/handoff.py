"""The hand-off curve (Fig. 1b): the student begins an answer, the teacher finishes it. How often is it right?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from iwopd.rollout.local import LocalSampler
from iwopd.types import Prompt, Rollout

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def handoff(
    rollouts: Sequence[Rollout],
    teacher: LocalSampler,
    tokenizer: Any,
    check: Callable[[Prompt, str], bool],
    *,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
) -> dict[float, Tensor]:
    """Scores [N, 1] of the teacher's continuations of the first part of each rollout, for every fraction.

    A prefix of `ceil(fraction * T)` tokens, as everywhere in the method. The continuation may be as long as a whole answer,
    whatever the prefix used up, so that the teacher is never cut off for the student's verbosity.
    """
    curve: dict[float, Tensor] = {}
    for fraction in fractions:
        prefixes = [rollout.response_ids[: math.ceil(Fraction(str(fraction)) * len(rollout))] for rollout in rollouts]
        prompts = [
            replace(
                rollout.prompt,
                id=f"{rollout.prompt.id}@{rollout.sample}",
                token_ids=(*rollout.prompt.token_ids, *prefix.tolist()),
            )
            for rollout, prefix in zip(rollouts, prefixes, strict=True)
        ]
        right = []
        for rollout, prefix, continuation in zip(rollouts, prefixes, teacher.sample(prompts, seed=seed, step=0), strict=True):
            whole = torch.cat([prefix, continuation.response_ids])
            text = str(tokenizer.decode(whole, skip_special_tokens=True))
            right.append(float(check(rollout.prompt, text)))
        curve[fraction] = torch.tensor(right, dtype=torch.float64)[:, None]
    return curve

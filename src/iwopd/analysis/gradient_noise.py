"""Gradient noise: how much of an update is what it would be on average, and how much the draw of its rollouts.

The same student answers several batches of prompts, and every method makes a gradient of each, without updating. With m
batches: noise^2 is the variance of a batch's gradient, summed over parameters; signal^2 is the squared norm of the mean
gradient, less the noise^2 / m that it still holds. A ratio of 1 means that a batch's gradient is half noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from iwopd.algo.gradients import dot
from iwopd.config import Config
from iwopd.teacher.scorer import Scorer
from iwopd.train.assembly import assemble
from iwopd.train.scoring import loss_columns, score_step, write_rollouts


class GradientNoise(NamedTuple):
    """Of one method on one student."""

    noise: float
    """Root of the summed variance of a batch's gradient."""
    signal: float
    """Norm of the expected gradient; 0 if the estimate of its square is not positive."""
    batches: int

    @property
    def ratio(self) -> float:
        """Noise over signal; infinite if no signal was found."""
        return self.noise / self.signal if self.signal else math.inf


def gradient_noise(
    config: Config,
    batches: int,
    advance: Callable[[int], None] = lambda done: None,
    teacher: Callable[[Scorer], Scorer] = lambda scorer: scorer,
) -> GradientNoise:
    """Of the untrained student of these settings; the batches are those of its first steps, equal for all methods.

    `teacher` puts something between the teacher and the method.
    """
    if batches < 2:
        raise ValueError(f"gradient noise needs at least 2 batches, got {batches}")
    with assemble(config, lambda _: None) as parts:
        parts.teacher_scorer = teacher(parts.teacher_scorer)
        total, squares = None, 0.0
        for step in range(1, batches + 1):
            scored = score_step(config, parts, write_rollouts(config, parts, step), step)
            columns = loss_columns(parts.objective, scored.batch, scored.evidence)
            found = [one.double() for one in parts.learner.gradient(scored.batch, columns)]
            squares += dot(found, found)
            total = found if total is None else [torch.add(one, other) for one, other in zip(total, found, strict=True)]
            advance(step)
    assert total is not None
    mean = dot(total, total) / batches**2
    variance = max(0.0, (squares - batches * mean) / (batches - 1))
    return GradientNoise(math.sqrt(variance), math.sqrt(max(0.0, mean - variance / batches)), batches)

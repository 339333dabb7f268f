"""Overlap inside a step: while the student writes the next chunk of answers, the teacher scores the finished one.

It stays on-policy, since the weights do not change within a step, and the noise behind each token does not depend on the chunk.
Worth it where the teacher computes elsewhere (a server); in one process both would only take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from iwopd.background import in_background
from iwopd.rollout.sampler import Sampler
from iwopd.teacher.scorer import Scorer
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt, Rollout


@dataclass
class Written:
    """The rollouts of a step, with the teacher's log-probs of this rank's share still under way."""

    rollouts: list[Rollout]
    """Of all ranks."""
    _scorer: Scorer
    _ranks: Ranks
    _pending: list[Future[list[Tensor]]] | None
    """Of this rank's rollouts, chunk by chunk; None: nothing was begun."""
    _samples: int
    """Rollouts of a prompt."""

    def teacher_logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of some of the step's rollouts. Called by all ranks together; waits for the teacher."""
        pending = self._pending
        if pending is None:  # no overlap: only what is asked for is scored
            return self._ranks.share(rollouts, self._scorer.score)
        prompts = range(len(self.rollouts) // self._samples)
        scores = self._ranks.share(prompts, lambda _: [score for chunk in pending for score in chunk.result()])
        by_rollout = {id(rollout): score for rollout, score in zip(self.rollouts, scores, strict=True)}
        return [by_rollout[id(rollout)] for rollout in rollouts]


def write_step(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    scorer: Scorer,
    ranks: Ranks,
    *,
    seed: int,
    step: int,
    samples: int = 1,
    chunks: int = 1,
) -> Written:
    """Rollouts of all prompts, each rank writing its share; with several chunks the teacher begins while others are written."""
    pending: list[Future[list[Tensor]]] = []

    def work(mine: Sequence[Prompt]) -> list[Rollout]:
        rollouts: list[Rollout] = []
        for chunk in cut(mine, chunks):
            rollouts += (written := sampler.sample(chunk, seed=seed, step=step, samples=samples))
            if chunks > 1:
                pending.append(_after(pending[-1] if pending else None, scorer, written))
        return rollouts

    return Written(ranks.share(prompts, work), scorer, ranks, pending if chunks > 1 else None, samples)


def cut(prompts: Sequence[Prompt], count: int) -> list[Sequence[Prompt]]:
    """Up to `count` chunks of neighbours whose sizes differ by one at most."""
    count = min(count, len(prompts))
    borders = [len(prompts) * number // count for number in range(count + 1)] if count else []
    return [prompts[first:last] for first, last in pairwise(borders)]


def _after(previous: Future[list[Tensor]] | None, scorer: Scorer, rollouts: list[Rollout]) -> Future[list[Tensor]]:
    """Score beside the main thread, chunk after chunk: a scorer is not asked twice at once."""

    def work() -> list[Tensor]:
        if previous is not None:
            previous.result()  # a teacher that failed is not asked again
        return scorer.score(rollouts)

    return in_background(work)

"""Overlap inside a step: while the student still writes some answers, the teacher scores those that are finished, and a checker
judges them.

It stays on-policy: the weights do not change within a step, and a token's noise does not depend on what else is under way.
Early scores are worth it where the teacher computes elsewhere (a server); in one process both would only take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol, TypeVar

from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.background import in_background
from iwopd.rollout.sampler import Sampler
from iwopd.teacher.scorer import HasModel, Scorer
from iwopd.train.checking import Checking, Judged
from iwopd.train.given import NOTHING_GIVEN, Given
from iwopd.train.ranks import Ranks
from iwopd.train.watching import Watching
from iwopd.types import Prompt, Rollout

Result = TypeVar("Result")


class Scoring:
    """A teacher at work beside the main thread: it takes all rollouts that wait, scores them, and looks again."""

    def __init__(self, scorer: Scorer, wanted: Wanted = NOTHING) -> None:
        self._scorer, self._wanted = scorer, wanted
        self._waiting: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()
        self._scores = in_background(self._work)

    def add(self, place: int, rollout: Rollout) -> None:
        """A finished rollout and its place among all. Raises what the teacher failed with: nobody writes on in vain."""
        if self._scores.done():
            self._scores.result()
        self._waiting.put((place, rollout))

    def close(self) -> None:
        """No more will come."""
        self._waiting.put(None)

    def scores(self) -> list[TokenScores]:
        """Of all rollouts in the order of their places; waits for them."""
        scores = self._scores.result()
        return [scores[place] for place in sorted(scores)]

    def _work(self) -> dict[int, TokenScores]:
        scores: dict[int, TokenScores] = {}
        taken: list[tuple[int, Rollout] | None] = []
        while None not in taken:
            taken = [self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get())
            items = dict(item for item in taken if item is not None)
            if items:
                scores.update(zip(items, self._scorer.look(list(items.values()), self._wanted), strict=True))
        return scores


class Scores(Protocol):
    """A teacher that is at work on the rollouts while they are written."""

    def scores(self) -> list[TokenScores]:
        """Of all rollouts, in their order; waits for them."""


@dataclass
class Written:
    """The rollouts of a step, with the teacher's log-probs of this rank's share still under way."""

    rollouts: list[Rollout]
    """Of all ranks."""
    _scorer: Scorer
    _ranks: Ranks
    _scoring: Scores | None
    """Of this rank's rollouts; None: nothing was begun."""
    _samples: int
    """Rollouts per prompt."""
    _wanted: Wanted
    """What the teacher is asked for."""
    _checking: Checking | None = None
    """Of this rank's rollouts; None: nobody judges."""
    _head: HasModel | None = None
    """Whose output matrix makes scores of the states that were kept of the answers; None: nobody's."""
    overrun: int | None = None
    """Tokens that were written past the places where answers stopped, and dropped; None: none could stop."""
    given: Given = NOTHING_GIVEN
    """What others wrote: not among `rollouts`."""

    def teacher_scores(self, rollouts: Sequence[Rollout], chosen: Sequence[Tensor] | None = None) -> list[TokenScores]:
        """Of some of the step's rollouts; `chosen` [T, K] are ids per token that the teacher is asked about.

        Called by all ranks together; waits for the teacher.
        """
        scoring = self._scoring
        if scoring is None or (chosen is not None and self._head is None):  # nothing was begun, or cannot be finished
            return look(self._scorer, self._ranks, rollouts, self._wanted, chosen)
        found = self._of(rollouts, scoring.scores)
        return found if chosen is None else self._of_states(rollouts, found, chosen)

    def _of_states(
        self, rollouts: Sequence[Rollout], found: Sequence[TokenScores], chosen: Sequence[Tensor]
    ) -> list[TokenScores]:
        """What the teacher's head says of chosen ids, from the states that it had while it followed the answers."""

        def work(places: Sequence[int]) -> list[TokenScores]:
            scores = []
            for place in places:
                states = found[place].states
                assert self._head is not None
                assert states is not None
                ids = rollouts[place].response_ids
                scores.append(self._head.lm.head_scores(states, ids, self._wanted, chosen[place]).cpu())
            return scores

        return self._ranks.share(range(len(rollouts)), work)

    def judged(self, rollouts: Sequence[Rollout]) -> list[Judged]:
        """What the checker said of some of the step's rollouts. Called by all ranks together; waits for it."""
        if self._checking is None:
            raise ValueError("nobody judges the rollouts of this step: write_step was called without rewards")
        return self._of(rollouts, self._checking.judged)

    def _of(self, rollouts: Sequence[Rollout], of_mine: Callable[[], list[Result]]) -> list[Result]:
        """The results of these rollouts, wherever they were written; `of_mine` gives those of this rank."""
        prompts = range(len(self.rollouts) // self._samples)
        results = self._ranks.share(prompts, lambda _: of_mine())
        by_rollout = {id(rollout): result for rollout, result in zip(self.rollouts, results, strict=True)}
        return [by_rollout[id(rollout)] for rollout in rollouts]


def look(
    scorer: Scorer,
    ranks: Ranks,
    rollouts: Sequence[Rollout],
    wanted: Wanted = NOTHING,
    chosen: Sequence[Tensor] | None = None,
) -> list[TokenScores]:
    """`scorer.look` of all rollouts, each rank doing its share."""

    def work(places: Sequence[int]) -> list[TokenScores]:
        ids = None if chosen is None else [chosen[place] for place in places]
        return scorer.look([rollouts[place] for place in places], wanted, ids)

    return ranks.share(range(len(rollouts)), work)


def write_step(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    scorer: Scorer,
    ranks: Ranks,
    *,
    seed: int,
    step: int,
    samples: int = 1,
    score_early: bool = False,
    wanted: Wanted = NOTHING,
    checking: Checking | None = None,
    limit: int | None = None,
    watching: Watching | None = None,
    head: HasModel | None = None,
) -> Written:
    """Rollouts of all prompts, each rank writing its share; with `score_early` the teacher begins while others are written.

    `wanted` is what the teacher is asked for beside log-probs; `checking` hears of every rollout as it is finished. Of a
    horizon: `limit`, most tokens of an answer, or `watching`, the teacher who follows the answers and stops some; `head`: with
    what its states become scores of ids that are chosen later.
    """
    scoring = Scoring(scorer, wanted) if score_early and watching is None else None
    listeners = [one for one in (scoring, checking) if one is not None]

    def reached(rollout: Rollout) -> Rollout:
        """An answer that ends at the limit has reached the horizon: it was not cut off."""
        return replace(rollout, stop_reason="horizon") if limit and rollout.stop_reason == "length" else rollout

    def finished(place: int, rollout: Rollout) -> None:
        for one in listeners:
            one.add(place, reached(rollout))

    def work(mine: Sequence[Prompt]) -> list[Rollout]:
        limits = None if limit is None else [limit] * len(mine)
        heard = finished if listeners else None
        try:
            written = sampler.sample(
                mine, seed=seed, step=step, samples=samples, max_tokens=limits, finished=heard, watcher=watching
            )
            return [reached(rollout) for rollout in written]
        finally:
            for one in listeners:
                one.close()

    rollouts = ranks.share(prompts, work)
    overrun = None if watching is None else sum(ranks.gather(sampler.overrun))
    return Written(rollouts, scorer, ranks, watching or scoring, samples, wanted, checking, head, overrun)

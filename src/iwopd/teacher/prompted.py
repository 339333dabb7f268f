"""A teacher that sees another prompt than the student (`data.teacher_view`). The answer's ids are the student's.

With the student's first weights as the teacher and the reference answer in its prompt, this is self-distillation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.teacher.scorer import Follower, HasModel, OutputMatrix, Scorer, ScoringPath
from iwopd.types import Piece, Prompt, Rollout


class PromptedScorer(Scorer):
    def __init__(self, scorer: Scorer, change: Callable[[Prompt], Prompt]) -> None:
        self.scorer, self.change = scorer, change
        self.here = scorer.here

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return self.scorer.score(self._seen(rollouts))

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        return self.scorer.look(self._seen(rollouts), wanted, chosen)

    def _seen(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """As the teacher sees them. Prompts of evaluation tasks that are no chats stay as they are."""
        return [replace(rollout, prompt=self.seen(rollout.prompt)) for rollout in rollouts]

    def seen(self, prompt: Prompt) -> Prompt:
        return self.change(prompt) if "messages" in prompt.metadata else prompt

    def follow(self, wanted: Wanted = NOTHING) -> PromptedFollower:
        return PromptedFollower(self.scorer.follow(wanted), self.seen)

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        return self.scorer.gives

    def output_matrix(self) -> OutputMatrix:
        return self.scorer.output_matrix()

    def local(self, name: str) -> dict[str, HasModel]:
        return self.scorer.local(name)

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """Those of the scorer inside: it must be right about any prompt, so also about the student's."""
        yield from self.scorer.paths(name)

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int, wanted: Wanted = NOTHING) -> None:
        """The template must fit every prompt, and the scorer inside takes what it makes of them."""
        seen = [self.change(prompt) for prompt in prompts]
        self.scorer.try_out(seen, vocab_size=vocab_size, max_tokens=max_tokens, wanted=wanted)


class PromptedFollower(Follower):
    def __init__(self, follower: Follower, seen: Callable[[Prompt], Prompt]) -> None:
        self._follower, self._seen = follower, seen

    @property
    def room(self) -> int:
        return self._follower.room

    def read(self, pieces: Sequence[Piece]) -> list[TokenScores]:
        return self._follower.read([replace(piece, prompt=self._seen(piece.prompt)) for piece in pieces])

    def leave(self, rows: Sequence[int]) -> None:
        self._follower.leave(rows)

"""Several teachers: each rollout goes to the one that its prompt names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.background import in_background
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.scorer import Follower, HasModel, OutputMatrix, Scorer, ScoringPath
from iwopd.types import Piece, Prompt, Rollout


class RoutedScorer(Scorer):
    """Scores by `Prompt.teacher`; None is the teacher of prompts that name none."""

    def __init__(self, teachers: Mapping[str | None, Scorer]) -> None:
        self.teachers = dict(teachers)
        self.here = any(scorer.here for scorer in self.teachers.values())

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [scores.logprobs for scores in self.look(rollouts)]

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        """What each rollout's teacher says of its tokens, in order."""

        def work(name: str | None, rows: Sequence[int]) -> list[TokenScores]:
            given = None if chosen is None else [chosen[row] for row in rows]
            return self.teachers[name].look([rollouts[row] for row in rows], wanted, given)

        return self.ask([rollout.prompt for rollout in rollouts], work)

    def follow(self, wanted: Wanted = NOTHING) -> RoutedFollower:
        return RoutedFollower(self, {name: scorer.follow(wanted) for name, scorer in self.teachers.items()})

    def ask(
        self, prompts: Sequence[Prompt], work: Callable[[str | None, Sequence[int]], list[TokenScores]]
    ) -> list[TokenScores]:
        """`work` of every teacher on the places of its prompts. Servers work at the same time, local models in turn."""
        rows: dict[str | None, list[int]] = {}
        for row, prompt in enumerate(prompts):
            self._check(prompt)
            rows.setdefault(prompt.teacher, []).append(row)
        away = {name: in_background(partial(work, name, rows[name])) for name in rows if not self.teachers[name].here}
        found = {name: work(name, rows[name]) for name in rows if name not in away}
        found |= {name: future.result() for name, future in away.items()}
        scores = {row: value for name, values in found.items() for row, value in zip(rows[name], values, strict=True)}
        return [scores[row] for row in range(len(prompts))]

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """What all of them give."""
        return frozenset.intersection(*(scorer.gives for scorer in self.teachers.values()))

    def output_matrix(self) -> OutputMatrix:
        if len(self.teachers) > 1:
            raise TeacherError(
                f"there are {len(self.teachers)} teachers, each with an output matrix of its own: whole distributions need one "
                "teacher (leave teacher.others out)"
            )
        return next(iter(self.teachers.values())).output_matrix()

    def _check(self, prompt: Prompt) -> None:
        if prompt.teacher not in self.teachers:
            known = ", ".join(repr(name) for name in self.teachers if name is not None) or "none by name"
            raise TeacherError(
                f"prompt {prompt.id!r} asks for the teacher {prompt.teacher!r}, but there are: {known}; add a section "
                f"[teacher.others.{prompt.teacher}] or correct the data"
            )

    def local(self, name: str) -> dict[str, HasModel]:
        return {key: one for route, inner in self.teachers.items() for key, one in inner.local(_named(name, route)).items()}

    def paths(self, name: str) -> Iterator[ScoringPath]:
        for route, inner in self.teachers.items():
            yield from inner.paths(_named(name, route))

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int, wanted: Wanted = NOTHING) -> None:
        """Every prompt's teacher must exist, and work on the prompts that name it."""
        for prompt in prompts:
            self._check(prompt)
        for name, scorer in self.teachers.items():
            named = [prompt for prompt in prompts if prompt.teacher == name]
            scorer.try_out(named, vocab_size=vocab_size, max_tokens=max_tokens, wanted=wanted)


class RoutedFollower(Follower):
    """Each answer goes to the follower of its prompt's teacher."""

    def __init__(self, router: RoutedScorer, followers: Mapping[str | None, Follower]) -> None:
        self._router, self._followers = router, followers

    @property
    def room(self) -> int:
        return min(follower.room for follower in self._followers.values())

    def read(self, pieces: Sequence[Piece]) -> list[TokenScores]:
        def work(name: str | None, places: Sequence[int]) -> list[TokenScores]:
            return self._followers[name].read([pieces[place] for place in places])

        return self._router.ask([piece.prompt for piece in pieces], work)

    def leave(self, rows: Sequence[int]) -> None:
        for follower in self._followers.values():
            follower.leave(rows)


def _named(name: str, route: str | None) -> str:
    return name if route is None else f"{name} {route!r}"

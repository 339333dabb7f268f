"""Several teachers: each rollout goes to the one that its prompt names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.background import in_background
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.scorer import HasModel, OutputMatrix, Scorer, ScoringPath
from iwopd.types import Prompt, Rollout


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
        """What each rollout's teacher says of its tokens, in order. Servers work at the same time, local models in turn."""
        rows: dict[str | None, list[int]] = {}
        for row, rollout in enumerate(rollouts):
            self._check(rollout.prompt)
            rows.setdefault(rollout.prompt.teacher, []).append(row)

        def work(name: str | None) -> list[TokenScores]:
            given = None if chosen is None else [chosen[row] for row in rows[name]]
            return self.teachers[name].look([rollouts[row] for row in rows[name]], wanted, given)

        away = {name: in_background(partial(work, name)) for name in rows if not self.teachers[name].here}
        found = {name: work(name) for name in rows if name not in away}
        found |= {name: future.result() for name, future in away.items()}
        scores = {row: value for name, values in found.items() for row, value in zip(rows[name], values, strict=True)}
        return [scores[row] for row in range(len(rollouts))]

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


def _named(name: str, route: str | None) -> str:
    return name if route is None else f"{name} {route!r}"

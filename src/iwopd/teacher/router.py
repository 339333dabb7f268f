"""Several teachers: each rollout goes to the one that its prompt names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from iwopd.background import in_background
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.scorer import HasModel, Scorer, ScoringPath
from iwopd.types import Prompt, Rollout


class RoutedScorer(Scorer):
    """Scores by `Prompt.teacher`; None is the teacher of prompts that name none."""

    def __init__(self, teachers: Mapping[str | None, Scorer]) -> None:
        self.teachers = dict(teachers)
        self.here = any(scorer.here for scorer in self.teachers.values())

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens, in order. Servers work at the same time, local models in turn."""
        rows: dict[str | None, list[int]] = {}
        for row, rollout in enumerate(rollouts):
            self._check(rollout.prompt)
            rows.setdefault(rollout.prompt.teacher, []).append(row)

        def work(name: str | None) -> list[Tensor]:
            return self.teachers[name].score([rollouts[row] for row in rows[name]])

        away = {name: in_background(partial(work, name)) for name in rows if not self.teachers[name].here}
        found = {name: work(name) for name in rows if name not in away}
        found |= {name: future.result() for name, future in away.items()}
        scores = {row: value for name, values in found.items() for row, value in zip(rows[name], values, strict=True)}
        return [scores[row] for row in range(len(rollouts))]

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

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int) -> None:
        """Every prompt's teacher must exist, and work on the prompts that name it."""
        for prompt in prompts:
            self._check(prompt)
        for name, scorer in self.teachers.items():
            scorer.try_out([p for p in prompts if p.teacher == name], vocab_size=vocab_size, max_tokens=max_tokens)


def _named(name: str, route: str | None) -> str:
    return name if route is None else f"{name} {route!r}"

"""Several teachers: each rollout goes to the one that its prompt names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from iwopd.background import in_background
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Scorer, ScoringPath
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
            self._find(rollout.prompt)
            rows.setdefault(rollout.prompt.teacher, []).append(row)
        here = [name for name in rows if self.teachers[name].here]
        scores: list[Tensor | None] = [None] * len(rollouts)

        def work(name: str | None) -> list[Tensor]:
            return self.teachers[name].score([rollouts[row] for row in rows[name]])

        away = {name: in_background(partial(work, name)) for name in rows if name not in here}
        found = {name: work(name) for name in here}
        found.update({name: future.result() for name, future in away.items()})
        for name, values in found.items():
            for row, value in zip(rows[name], values, strict=True):
                scores[row] = value
        return [score for score in scores if score is not None]

    def _find(self, prompt: Prompt) -> Scorer:
        if prompt.teacher not in self.teachers:
            known = ", ".join(repr(name) for name in self.teachers if name is not None) or "none by name"
            raise TeacherError(
                f"prompt {prompt.id!r} asks for the teacher {prompt.teacher!r}, but there are: {known}; add a section "
                f"[teacher.others.{prompt.teacher}] or correct the data"
            )
        return self.teachers[prompt.teacher]

    def local(self, name: str) -> dict[str, LocalScorer]:
        """Those of all teachers, by name and route."""
        return {key: one for route, inner in self.teachers.items() for key, one in inner.local(_named(name, route)).items()}

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """Those of all teachers."""
        for route, inner in self.teachers.items():
            yield from inner.paths(_named(name, route))

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int) -> None:
        """Every prompt's teacher must exist, and work on the prompts that name it."""
        for prompt in prompts:
            self._find(prompt)
        for name, scorer in self.teachers.items():
            mine = [prompt for prompt in prompts if prompt.teacher == name]
            scorer.try_out(mine, vocab_size=vocab_size, max_tokens=max_tokens)


def _named(name: str, route: str | None) -> str:
    return name if route is None else f"{name} {route!r}"

"""Several teachers: each rollout goes to the one that its prompt names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from iwopd.background import in_background
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.types import Prompt, Rollout


class RoutedScorer:
    """Scores by `Prompt.teacher`; None is the teacher of prompts that name none."""

    def __init__(self, teachers: Mapping[str | None, Scorer]) -> None:
        self.teachers = dict(teachers)

    def check_routes(self, prompts: Iterable[Prompt]) -> None:
        """Every prompt's teacher must exist: found out before training, not when its turn comes."""
        for prompt in prompts:
            self._find(prompt)

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens, in order. Servers work at the same time, local models in turn."""
        rows: dict[str | None, list[int]] = {}
        for row, rollout in enumerate(rollouts):
            self._find(rollout.prompt)
            rows.setdefault(rollout.prompt.teacher, []).append(row)
        here = [name for name in rows if any(True for _ in local_scorers(self.teachers[name]))]
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


def local_scorers(scorer: Scorer | None, name: str = "teacher") -> Iterator[tuple[str, LocalScorer]]:
    """The scorers of this process inside a scorer, by name."""
    if isinstance(scorer, LocalScorer):
        yield name, scorer
    elif isinstance(scorer, PromptedScorer):
        yield from local_scorers(scorer.scorer, name)
    elif isinstance(scorer, RoutedScorer):
        for route, inner in scorer.teachers.items():
            yield from local_scorers(inner, name if route is None else f"{name} {route!r}")

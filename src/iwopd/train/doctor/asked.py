"""What was said of the rollouts that the doctor looks at: several checks read it, and nobody is asked twice.

A pass over an answer's far end costs as much as the longest answer of a step, so it counts how many there are: one as the run
scores it, one of the model's plain forward pass, for each model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from iwopd.lm import ResponseModel
from iwopd.teacher.scorer import Scorer, ScoringPath
from iwopd.train.doctor.echo import own_logprobs
from iwopd.train.doctor.float32 import HALF, float32_obstacle, in_float32
from iwopd.train.parts import Parts
from iwopd.types import Rollout


class Asked:
    """The paths of a run, and their answers so far."""

    def __init__(self, parts: Parts, temperature: float) -> None:
        self._temperature, self._ids = temperature, len(parts.tokenizer)
        self.scorers: dict[str, Scorer] = {"student": parts.student_scorer, "teacher": parts.teacher_scorer}
        if parts.reference_scorer is not None:
            self.scorers["reference"] = parts.reference_scorer
        self.paths = {kind: list(scorer.paths(kind)) for kind, scorer in self.scorers.items()}
        self.local = {name: one.lm for kind, scorer in self.scorers.items() for name, one in scorer.local(kind).items()}
        self._read: dict[tuple[ScoringPath, tuple[Rollout, ...]], list[Rollout]] = {}
        self._scores: dict[tuple[Scorer, Rollout], Tensor] = {}
        self._own: dict[tuple[ResponseModel, Rollout], Tensor] = {}

    def read(self, path: ScoringPath, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """As the path's scorer gets them."""
        key = (path, tuple(rollouts))
        if key not in self._read:
            self._read[key] = path.read(rollouts)
        return self._read[key]

    def scores(self, scorer: Scorer, read: Sequence[Rollout]) -> list[Tensor]:
        """As the run scores them, side by side."""
        if any((scorer, rollout) not in self._scores for rollout in read):
            found = scorer.score(read)
            if len(found) != len(read):
                return found  # which a check will say
            self._scores |= {(scorer, rollout): values for rollout, values in zip(read, found, strict=True)}
        return [self._scores[scorer, rollout] for rollout in read]

    def own(self, path: ScoringPath, read: Sequence[Rollout]) -> list[Tensor] | None:
        """By the plain forward pass of the path's model in its precision; None if it is not in this process."""
        if (lm := self.local.get(path.model_name)) is None:
            return None
        if missing := [rollout for rollout in read if (lm, rollout) not in self._own]:
            found = own_logprobs(lm.model, missing, self._temperature, self._ids_of(path), lm.autocast)
            self._own |= {(lm, rollout): values for rollout, values in zip(missing, found, strict=True)}
        return [self._own[lm, rollout] for rollout in read]

    def exact(self, path: ScoringPath, read: Sequence[Rollout]) -> list[Tensor] | None:
        """By the plain forward pass in float32, which is `own` for a model that is; None where that cannot be had."""
        lm = self.local.get(path.model_name)
        if lm is None or float32_obstacle(lm.model) is not None:
            return None
        if not _rounds(lm):
            return self.own(path, read)
        try:
            # Its own context, because the student's adapter may be off in it, but without autocast.
            with in_float32(lm.model), lm.autocast(), torch.autocast(lm.device.type, enabled=False):
                return own_logprobs(lm.model, read, self._temperature, self._ids_of(path))
        except torch.OutOfMemoryError:  # a run that would fit must not fail for this
            return None

    def _ids_of(self, path: ScoringPath) -> int:
        return self._ids if path.reader is None else path.reader.ids


def _rounds(lm: ResponseModel) -> bool:
    """Whether its plain forward pass computes in less than float32."""
    with lm.autocast():
        autocast = torch.is_autocast_enabled(lm.device.type)
    return autocast or any(weight.dtype in HALF for weight in lm.model.parameters())

"""Teachers with the faults that others have shipped, behind a real server or in this process: healthy until told otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.serving_model import ServingModel
from iwopd.types import Rollout

Fault = Callable[[list[TokenScores], int, int], list[TokenScores]]
"""What becomes of honest scores: of the answers of one batch, when it was asked for the n-th time, with V ids."""


def _each(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda scores, call, vocab: [replace(one, logprobs=change(one.logprobs)) for one in scores]


def _uniform(scores: list[TokenScores], call: int, vocab: int) -> list[TokenScores]:
    """Logits that are all 0."""
    flat = -math.log(vocab)
    return [
        replace(
            one,
            logprobs=torch.full_like(one.logprobs, flat),
            entropy=None if one.entropy is None else torch.full_like(one.entropy, -flat),
        )
        for one in scores
    ]


def _noisy(scores: list[TokenScores], call: int, vocab: int) -> list[TokenScores]:
    generator = torch.Generator().manual_seed(call)
    return [replace(one, logprobs=one.logprobs - 0.3 * torch.rand(len(one.logprobs), generator=generator)) for one in scores]


FAULTS: dict[str, Fault] = {
    "the token after": _each(lambda values: torch.cat([values[1:], values[-1:]])),
    "the token before": _each(lambda values: torch.cat([values[:1], values[:-1]])),
    "uniform": _uniform,
    "wakes up uniform": lambda scores, call, vocab: _uniform(scores, call, vocab) if call > 1 else scores,
    "never twice the same": _noisy,
    "depends on its company": lambda scores, call, vocab: _noisy(scores, 0, vocab) if len(scores) == 1 else scores,
    "another temperature": _each(lambda values: values * 0.8),
    "above 0": _each(lambda values: values + 20.0),
}


class FaultyServingModel(ServingModel):
    """`fault` names what is wrong with it from now on; its calls are counted from there."""

    fault: str | None = None
    calls = 0

    def break_down(self, fault: str | None) -> None:
        self.fault, self.calls = fault, 0

    def _look(self, jobs: list[Any]) -> list[TokenScores]:
        found = super()._look(jobs)
        self.calls += 1
        return found if self.fault is None else FAULTS[self.fault](found, self.calls, self.vocab_size)


class FaultyScorer(LocalScorer):
    """The same in this process. `fault` may be set on the class, for scorers that others make."""

    fault: str | None = None
    calls = 0

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        found = super().look(rollouts, wanted, chosen)
        self.calls += 1
        return found if self.fault is None else FAULTS[self.fault](found, self.calls, self.lm.vocab_size or 0)

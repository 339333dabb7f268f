"""What the trainer asks of anybody who scores, wherever the model is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from iwopd.lm import HeadCheck, ResponseModel, Sequences
from iwopd.types import Prompt, Rollout


class HasModel(Protocol):
    """A scorer whose model is in this process."""

    lm: ResponseModel

    def check_head(self, sequences: Sequences, *, trained: bool = False) -> HeadCheck: ...


class Scorer(ABC):
    """Log-probs of given rollouts. Only `score` must be implemented."""

    here: bool = False
    """Whether it computes in this process: two such scorers would only take turns."""

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens, in order, at the sampling temperature; -inf where impossible."""

    def local(self, name: str) -> dict[str, HasModel]:
        """The scorers inside it whose model is in this process, by name. Its own name is `name`."""
        return {}

    @property
    def whole_distribution(self) -> HasModel | None:
        """The local scorer that sees rollouts just as the student wrote them, and so can give whole distributions."""
        return None

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """Every path to its log-probs: each of several teachers, each replica of a server."""
        yield ScoringPath(f"{name} ({type(self).__name__})", name, self, half=True)

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int) -> None:
        """Refuse before training what would fail during it. `prompts` are all that it will see."""
        return


@dataclass(frozen=True, eq=False)
class ScoringPath:
    """A path to the log-probs of a model. Paths to the same `model_name` must agree."""

    name: str
    """For the reader, e.g. `teacher (local)` or `teacher (http://gpu1:8000)`."""
    model_name: str
    """student, teacher, reference, or the name of one of several teachers."""
    scorer: Scorer
    half: bool = False
    """Whether its model computes in half precision."""

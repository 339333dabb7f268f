"""What the trainer asks of anybody who scores, wherever the model is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from iwopd.algo.head import Precision
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.lm import HeadCheck, ResponseModel, Sequences
from iwopd.types import Piece, Prompt, Rollout

UNLIMITED = 2**31
"""`room` of a follower that keeps nothing here."""


class HasModel(Protocol):
    """A scorer whose model is in this process."""

    lm: ResponseModel

    def check_head(self, sequences: Sequences, *, trained: bool = False) -> HeadCheck: ...


@dataclass(frozen=True, eq=False)
class OutputMatrix:
    """What makes distributions of a teacher's hidden states."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V]."""
    temperature: float = 1.0
    vocab_size: int | None = None
    precision: Precision = "float32"


class Follower(ABC):
    """Scores answers while they are written, piece by piece. What it has read it does not read again."""

    @property
    def room(self) -> int:
        """Tokens of answers under way, prompts included, that it can keep in mind at a time."""
        return UNLIMITED

    @abstractmethod
    def read(self, pieces: Sequence[Piece]) -> list[TokenScores]:
        """Of the tokens of each piece, given its prompt and all earlier pieces of the same answer (`Piece.row`).

        Log-probs as `Scorer.look` gives them for the whole answer. At most one piece of an answer in a call.
        """

    @abstractmethod
    def leave(self, rows: Sequence[int]) -> None:
        """No more will come of these answers."""


class Scorer(ABC):
    """Log-probs of given rollouts. Only `score` must be implemented."""

    here: bool = False
    """Whether it computes in this process: two such scorers would only take turns."""
    gives: frozenset[str] = frozenset()
    """What it can say of tokens beside their log-probs: the names of `algo.views.Wanted.names`."""

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens, in order, at the sampling temperature; -inf where impossible."""

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        """Log-probs and all that is wanted of each rollout's response tokens; `chosen` [T, K] are ids per token."""
        if wanted != NOTHING:
            raise TypeError(f"{type(self).__name__} gives log-probs only, not {', '.join(sorted(wanted.names))}")
        return [TokenScores(logprobs) for logprobs in self.score(rollouts)]

    def follow(self, wanted: Wanted = NOTHING) -> Follower:
        """Somebody who scores the answers of one step while they are written."""
        raise TypeError(f"{type(self).__name__} cannot score answers while they are written")

    def output_matrix(self) -> OutputMatrix:
        """The matrix that belongs to the states which `look` gives."""
        raise TypeError(f"{type(self).__name__} has no output matrix to give")

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

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int, wanted: Wanted = NOTHING) -> None:
        """Refuse before training what would fail during it. `prompts` are all that it will see, `wanted` what it is asked."""
        return


class ReadsOtherIds(Protocol):
    """What is known of a teacher with another tokenizer (`foreign.Reader`)."""

    ids: int
    """Of its tokenizer."""

    def see(self, prompt: Prompt) -> Prompt: ...
    def rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]: ...


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
    reader: ReadsOtherIds | None = None
    """Who tells it in its own ids what the student wrote; None: it reads the student's."""

    def read(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """As its scorer gets them."""
        return list(rollouts) if self.reader is None else self.reader.rollouts(rollouts)

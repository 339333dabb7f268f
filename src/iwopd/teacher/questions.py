"""What is asked of a teacher server, and the protocol of those who ask: one dialect for each kind of server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, of which those from `start` on are to be scored."""

    ids: tuple[int, ...]
    start: int
    chosen: Tensor | None = field(default=None, compare=False)
    """[T, K] ids for each of the tokens that are scored, whose log-probs are wanted; `NO_ID` where there is none."""

    more: bool | None = field(default=None, compare=False)
    """The sequence grows: whether more of it will come. None: it is asked about once."""

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.ids[self.start :]


@dataclass(frozen=True)
class Drawn:
    """A token that the server sampled at temperature 1, with its log-prob."""

    id: int
    logprob: float


class Dialect(Protocol):
    """The protocol of one kind of server. An answer that is not believed is a `TeacherError`."""

    gives: frozenset[str]
    """What it can say of tokens beside their log-probs: names as in `Wanted.names`."""
    path: str
    """Where it scores."""
    drawing_path: str
    limits: str
    """What may keep a server from giving what such servers can give, and the remedy."""

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> Any:
        """The request that scores these sequences: bytes, or what becomes JSON."""

    def parse(self, content: bytes) -> Any:
        """The answer to it, not yet believed; a `GarbledError` if it cannot be read at all."""

    def scores(self, answer: Any, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> list[TokenScores]:
        """What it says of the ids from `start` on, per sequence; log-probs of impossible tokens are -inf."""

    def most_bytes(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> int:
        """No honest answer is longer."""

    def drawing(self, model: str | None, ids: Sequence[int]) -> dict[str, Any]:
        """The request that samples one more token at temperature 1."""

    def drawn(self, answer: Any) -> Drawn: ...

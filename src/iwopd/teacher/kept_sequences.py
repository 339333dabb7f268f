"""Sequences that a served model has lately read, and goes on from: clients that follow answers send them again, longer.

What is kept is found by the ids themselves, so no sequence gets the state of another one. The least recently used go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from iwopd.algo.views import TokenScores, Wanted
from iwopd.teacher.following import FIRST_COLUMNS, LocalFollower
from iwopd.teacher.questions import TokenSequence
from iwopd.types import Piece, Prompt

Ids = tuple[int, ...]


AT_ONCE = 0.25
"""Share of the cache for sequences that are being read; what is kept for later takes the rest."""


@dataclass(frozen=True)
class _Known:
    """A sequence that is kept, as an answer of the follower."""

    row: int
    ids: Ids
    call: int
    """When it was last used."""

    @property
    def size(self) -> int:
        return _size(self.ids)


class KeptSequences:
    """Scores of sequences, of which only what is new is read."""

    def __init__(self, follower: LocalFollower, room: int) -> None:
        """`room`: tokens whose keys and values have room."""
        self._follower, self.room = follower, room
        self._known: dict[Ids, list[_Known]] = {}
        """By their ids, the least recently used first; clients may have equal ones."""
        self._rows = self._calls = 0
        self.kept = 0
        """Tokens that the caches of now have room for."""
        self.read = 0
        """Tokens that went through the model so far."""
        self.continued = 0
        """Sequences that went on from a state that was kept."""

    def scores(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> list[TokenScores]:
        """Of the tokens from `start` on. Those of which no more will come are not kept.

        Sequences that go on from a state come first, and none makes room for another one of the same call. Else, where all of
        them have no room, each would be gone before its turn comes again.
        """
        self._calls += 1
        order = sorted(range(len(sequences)), key=lambda place: not self._state(sequences[place]))
        found: dict[int, TokenScores] = {}
        try:
            for places in self._groups(sequences, order):
                found.update(zip(places, self._scores([sequences[place] for place in places], wanted), strict=True))
        except BaseException:
            self.forget()  # what was half read is no state of anything
            raise
        return [found[place] for place in range(len(sequences))]

    def forget(self) -> None:
        """Everything."""
        self._follower.leave(range(self._rows))
        self._known, self._rows, self.kept = {}, 0, 0

    def _groups(self, sequences: Sequence[TokenSequence], order: Sequence[int]) -> list[list[int]]:
        """Places of sequences that are read together."""
        groups: list[list[int]] = []
        size = 0
        for place in order:
            own = _size(sequences[place].ids)
            if not groups or size + own > AT_ONCE * self.room:
                groups.append([])
                size = 0
            groups[-1].append(place)
            size += own
        return groups

    def _scores(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> list[TokenScores]:
        pieces = []
        for sequence in sequences:
            row, known = self._take(self._state(sequence))
            begin = known or sequence.start
            ids = torch.tensor(sequence.ids[begin:])
            pieces.append(Piece(row, Prompt("", sequence.ids[:begin]), ids, torch.empty(0)))
            self.continued += known > 0
            self.read += len(ids) if known else len(sequence.ids) - 1  # the last token waits for the next
        scores = self._follower.read(pieces, wanted)
        for piece, sequence in zip(pieces, sequences, strict=True):
            self._keep(_Known(piece.row, sequence.ids, self._calls), bool(sequence.more))
        return [_last(one, len(sequence.answer)) for one, sequence in zip(scores, sequences, strict=True)]

    def _state(self, sequence: TokenSequence) -> Ids:
        """The longest sequence that is kept and that this one goes on from; empty: there is none."""
        ids = sequence.ids[: sequence.start]
        if ids in self._known:
            return ids
        shorter = sorted({len(known) for known in self._known if len(known) < len(ids)}, reverse=True)
        return next((ids[:length] for length in shorter if ids[:length] in self._known), ())

    def _take(self, ids: Ids) -> tuple[int, int]:
        """Row and length of a state, which is not kept any more; a new row where there is none."""
        if ids:
            return self._remove(ids).row, len(ids)
        self._rows += 1
        return self._rows - 1, 0

    def _keep(self, one: _Known, more: bool) -> None:
        room = (1 - AT_ONCE) * self.room
        while more and self.kept + one.size > room and self._known:
            oldest = next(iter(self._known))
            if self._known[oldest][-1].call == self._calls:
                break
            self._follower.leave([self._remove(oldest).row])
        if not more or self.kept + one.size > room:
            self._follower.leave([one.row])
            return
        self._known[one.ids] = [*self._known.pop(one.ids, ()), one]
        self.kept += one.size

    def _remove(self, ids: Ids) -> _Known:
        one = self._known[ids].pop()
        if not self._known[ids]:
            del self._known[ids]
        self.kept -= one.size
        return one


def _size(ids: Ids) -> int:
    """Columns of its cache, at most: they double."""
    return max(FIRST_COLUMNS, 2 * len(ids))


def _last(scores: TokenScores, count: int) -> TokenScores:
    return scores.map(lambda values: values[len(values) - count :])

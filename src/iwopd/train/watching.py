"""The teacher follows answers while they are written, and those stop whose next token would weigh too little."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.algo.horizons import next_weights
from iwopd.algo.logprobs import floor_logprobs
from iwopd.algo.views import TokenScores, joined_scores
from iwopd.rollout.horizons import Drift
from iwopd.teacher.scorer import Follower
from iwopd.types import Piece


class Watching:
    """A `rollout.sampler.Watcher` over the answers of one step. The teacher's scores are kept for the update."""

    def __init__(self, horizon: Drift, follower: Follower, agreement: float = 0.0) -> None:
        """`agreement` is that of the gradients so far, for rules that follow it."""
        self._horizon, self._follower = horizon, follower
        self._params = {**horizon.params, **({"agreement": agreement} if horizon.follows_gradients else {})}
        self._gaps: dict[int, list[Tensor]] = {}
        self._scores: dict[int, list[TokenScores]] = {}

    @property
    def room(self) -> int:
        return self._follower.room

    def next_look(self, length: int) -> int:
        return self._horizon.next_look(length)

    def look(self, pieces: Sequence[Piece]) -> list[bool]:
        found = self._follower.read(pieces)
        theirs = torch.cat([scores.logprobs for scores in found])
        ours = torch.cat([piece.logprobs for piece in pieces])
        floored = floor_logprobs(theirs, torch.ones_like(theirs, dtype=torch.bool)).logprobs
        gaps = (floored.double() - ours.double()).split([len(piece.ids) for piece in pieces])
        for piece, scores, gap in zip(pieces, found, gaps, strict=True):
            self._scores.setdefault(piece.row, []).append(scores)
            self._gaps.setdefault(piece.row, []).append(gap)
        going = [piece.row for piece in pieces if not (piece.ended or self._horizon.spares(piece.prompt.id))]
        stopped = {row for row, low in zip(going, self._low(going), strict=True) if low}
        gone = [piece.row for piece in pieces if piece.ended or piece.row in stopped]
        self._follower.leave(gone)
        for row in gone:
            del self._gaps[row]
        return [piece.row in stopped for piece in pieces]

    def _low(self, rows: Sequence[int]) -> list[bool]:
        """Whether what would follow weighs less than the threshold."""
        if not rows:
            return []
        gaps = [torch.cat(self._gaps[row]) for row in rows]
        mask = pad_sequence([torch.ones_like(gap, dtype=torch.bool) for gap in gaps], batch_first=True)
        horizon = self._horizon
        weights = next_weights(pad_sequence(gaps, batch_first=True), mask, horizon.weights, self._params)
        found: list[bool] = (weights < horizon.threshold).tolist()
        return found

    def scores(self) -> list[TokenScores]:
        """Of all answers, in the order of their rows."""
        return [joined_scores(self._scores[row]) for row in sorted(self._scores)]

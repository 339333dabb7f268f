"""A local teacher that is on the accelerator only while it scores: the student writes and trains with the memory for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.lm import HeadCheck, Sequences
from iwopd.teacher.following import LocalFollower
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import OutputMatrix
from iwopd.types import Rollout


class OffloadedScorer(LocalScorer):
    """Whoever asks it brings it back; `leave` sends it away. Moving changes no number, so neither its scores.

    An output matrix that somebody has asked for stays on the accelerator: whole distributions are made with it in the update.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.home = self.lm.device
        """Where it scores."""

    @classmethod
    def of(cls, scorer: LocalScorer) -> OffloadedScorer:
        """The same scorer, which moves."""
        lm = scorer.lm
        options: dict[str, Any] = {"temperature": lm.temperature, "vocab_size": lm.vocab_size, "autocast": lm.autocast}
        return cls(lm.model, token_budget=scorer.token_budget, head_precision=lm.head_precision, **options)

    @property
    def moves(self) -> bool:
        """On a CPU there is nowhere to go."""
        return self.home.type != "cpu"

    def leave(self) -> None:
        """Nobody will ask for a while."""
        if self.moves and self.lm.device == self.home:
            self.lm.model.to("cpu")

    def arrive(self) -> None:
        """Somebody needs it: to be asked, or to write answers with its model."""
        if self.lm.device != self.home:
            self.lm.model.to(self.home)

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        self.arrive()
        return super().look(rollouts, wanted, chosen)

    def follow(self, wanted: Wanted = NOTHING) -> LocalFollower:
        """It stays until `leave`, which comes after the answers."""
        self.arrive()
        return super().follow(wanted)

    def output_matrix(self) -> OutputMatrix:
        self.arrive()
        return super().output_matrix()

    def check_head(self, sequences: Sequences, *, trained: bool = False) -> HeadCheck:
        self.arrive()
        return super().check_head(sequences, trained=trained)

"""Where a run stands, and how it stops."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iwopd.algo.agreement import RunningMean
from iwopd.errors import UserError
from iwopd.types import StepStats

CATCH_UP = 4
"""Steps over which a budget of tokens is balanced: at once, the second step would be far larger than the others."""


class TrainingStoppedError(UserError, RuntimeError):
    """The run ended before its last step; `exit_code` is what the process should return."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class TrainingState:
    """What a checkpoint must bring back besides weights, optimizer and random states."""

    step: int = 0
    skipped_in_a_row: int = 0
    skipped: int = 0
    best: float | None = None
    """Highest accuracy of the task that `checkpoint.best` names, and the step it was reached at."""
    best_step: int | None = None
    tokens_written: int = 0
    """By the student, in training."""
    tokens_per_prompt: float | None = None
    """Of the last step."""
    agreement_total: float = 0.0
    agreement_count: float = 1.0
    """Running mean of the agreement of gradients (`algo.agreement`)."""

    @property
    def agreement(self) -> float:
        """0 before the first step."""
        return RunningMean(self.agreement_total, self.agreement_count).mean

    def prompts(self, tokens_per_step: int | None) -> int | None:
        """How many prompts the next step takes so that the run writes so many tokens a step; None: the usual number.

        What earlier steps wrote too little or too much is made up for over the next few.
        """
        if tokens_per_step is None or self.tokens_per_prompt is None:
            return None
        behind = tokens_per_step * self.step - self.tokens_written
        return max(1, round((tokens_per_step + behind / CATCH_UP) / self.tokens_per_prompt))

    def finished(self, stats: StepStats) -> None:
        """A step is done; some of its updates may not have touched the weights."""
        skipped = int(stats.metrics["update/skipped"])
        self.step, self.skipped = stats.step, self.skipped + skipped
        tokens = int(stats.metrics["tokens_written"])
        self.tokens_written += tokens
        if prompts := int(stats.metrics["prompts"]):  # else others wrote all answers
            self.tokens_per_prompt = tokens / prompts
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        found = stats.metrics.get("gradient/agreement", math.nan)
        running = RunningMean(self.agreement_total, self.agreement_count).add(found if math.isfinite(found) else None)
        self.agreement_total, self.agreement_count = running.total, running.count

    def note(self, step: int, accuracy: float | None) -> bool:
        """Whether this is the best yet (and if it is, remember it)."""
        if accuracy is None or (self.best is not None and accuracy <= self.best):
            return False
        self.best, self.best_step = accuracy, step
        return True

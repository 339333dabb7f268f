"""Where a run stands, and how it stops."""

from __future__ import annotations

from dataclasses import dataclass

from iwopd.errors import UserError


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

    def finished(self, step: int, skipped: int) -> None:
        """A step is done; `skipped` of its updates did not touch the weights."""
        self.step, self.skipped = step, self.skipped + skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def note(self, step: int, accuracy: float | None) -> bool:
        """Whether this is the best yet (and if it is, remember it)."""
        if accuracy is None or (self.best is not None and accuracy <= self.best):
            return False
        self.best, self.best_step = accuracy, step
        return True

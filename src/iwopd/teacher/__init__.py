"""Scorers: from `Rollout` to log-probs."""

from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Scorer

__all__ = ["LocalScorer", "Scorer"]

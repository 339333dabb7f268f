"""Scorers: who tells how likely each token of a rollout is."""

from iwopd.teacher.local import LocalScorer

__all__ = ["LocalScorer"]

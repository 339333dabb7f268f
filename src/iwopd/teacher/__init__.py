"""Scorers: from `Rollout` to log-probs."""

from iwopd.teacher.errors import TeacherError, TeacherGoneError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer, ScoringPath
from iwopd.teacher.server import ServerScorer, ServerSettings

__all__ = [
    "LocalScorer",
    "PromptedScorer",
    "RoutedScorer",
    "Scorer",
    "ScoringPath",
    "ServerScorer",
    "ServerSettings",
    "TeacherError",
    "TeacherGoneError",
]

"""The doctor: checks a recipe before it trains, and refuses what would fail or train on wrong numbers."""

from iwopd.train.doctor.echo import ScoringPath, check_echo, own_logprobs
from iwopd.train.doctor.examination import examine_models, examine_recipe
from iwopd.train.doctor.findings import DoctorError, Finding, refuse

__all__ = [
    "DoctorError",
    "Finding",
    "ScoringPath",
    "check_echo",
    "examine_models",
    "examine_recipe",
    "own_logprobs",
    "refuse",
]

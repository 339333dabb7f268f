"""The doctor: checks a recipe before it trains, and refuses what would fail or train on wrong numbers."""

from iwopd.train.doctor.echo import check_echo, own_logprobs
from iwopd.train.doctor.examination import examine_models, examine_recipe
from iwopd.train.doctor.findings import DoctorError, Finding, refuse
from iwopd.train.doctor.self_check import examine_pipeline
from iwopd.train.doctor.working import head_findings

__all__ = [
    "DoctorError",
    "Finding",
    "check_echo",
    "examine_models",
    "examine_pipeline",
    "examine_recipe",
    "head_findings",
    "own_logprobs",
    "refuse",
]

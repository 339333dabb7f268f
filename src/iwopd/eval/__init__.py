"""Evaluation: sample a model on a task's problems and check the answers."""

from iwopd.eval.code import CodeJob, CodeOutcome, SandboxError, check_code, check_code_many
from iwopd.eval.math import MathOutcome, check_math, check_math_many
from iwopd.eval.runner import Evaluation, evaluate
from iwopd.eval.task import Checker, Task, Verdict

__all__ = [
    "Checker",
    "CodeJob",
    "CodeOutcome",
    "Evaluation",
    "MathOutcome",
    "SandboxError",
    "Task",
    "Verdict",
    "check_code",
    "check_code_many",
    "check_math",
    "check_math_many",
    "evaluate",
]

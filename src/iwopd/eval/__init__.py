"""Evaluation: samples of a model on a task's problems, checked."""

from iwopd.eval.math import MathOutcome, check_math
from iwopd.eval.runner import Evaluation, evaluate
from iwopd.eval.task import Checker, Task, Verdict

__all__ = ["Checker", "Evaluation", "MathOutcome", "Task", "Verdict", "check_math", "evaluate"]

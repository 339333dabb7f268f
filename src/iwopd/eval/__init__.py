"""Evaluation: samples of a model on a task's problems, checked."""

from iwopd.eval.runner import Evaluation, Task, evaluate

__all__ = ["Evaluation", "Task", "evaluate"]

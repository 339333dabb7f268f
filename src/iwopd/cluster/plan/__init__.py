"""Scale on paper: what a recipe needs on GPUs that are not there. The model and its sources: docs/plan.md."""

from iwopd.cluster.plan.estimate import Plan, make_plan
from iwopd.cluster.plan.gpus import GPUS, Gpu, PlanError, find_gpu
from iwopd.cluster.plan.horizon import CutLengths
from iwopd.cluster.plan.starting import memory_warnings
from iwopd.cluster.plan.words import as_dict, report
from iwopd.cluster.plan.workload import Workload, open_workload

__all__ = [
    "GPUS",
    "CutLengths",
    "Gpu",
    "Plan",
    "PlanError",
    "Workload",
    "as_dict",
    "find_gpu",
    "make_plan",
    "memory_warnings",
    "open_workload",
    "report",
]

"""What is trained: the paper's methods, the controls that a sceptic would ask for, other student sizes and teachers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from iwopd.methods import ALPHAS, METHODS, TITLES


@dataclass(frozen=True)
class Variant:
    """A row of a table: what it changes in the settings that all runs share."""

    title: str
    method: Mapping[str, Any] = field(default_factory=dict)
    lr_factor: float = 1.0
    models: Mapping[str, str] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)

    def with_rollout(self, title: str, **settings: Any) -> Variant:
        """The same with other settings of `[rollout]`."""
        return replace(self, title=title, rollout={**self.rollout, **settings})


def method(name: str) -> Variant:
    return Variant(TITLES[name], METHODS[name])


OPD, IW_OPD = method("opd"), method("iw-opd")
PREFIX, SUFFIX = method("prefix-30"), method("suffix-30")
IW_MEAN_ONE = Variant(
    "IW-OPD, weights of mean one", {"weights": "cumulative-share", "params": {"gamma": 0.5, "normalize": "mean-one"}}
)
IDEAL = tuple(Variant(f"Ideal weight, alpha {alpha:g}", {"weights": "ideal", "params": {"alpha": alpha}}) for alpha in ALPHAS)
ABLATIONS = tuple(
    method(name)
    for name in ("fixed-prefix", "linear-decay", "curriculum", "ideal", "ideal-blend", "signed", "surrogate-only", "iw-opd")
)
EXOPD, IW_EXOPD, SURVIVAL = method("exopd"), method("iw-exopd"), method("survival")
KL, KL_SURVIVAL = method("kl"), method("kl-survival")
OBJECTIVES = (OPD, KL, SURVIVAL, KL_SURVIVAL)
DIVERGENCES = (KL, *(method(name) for name in ("forward-kl", "jsd", "top-k-kl")))


def faster(variant: Variant, factor: float) -> Variant:
    """The same at another learning rate."""
    return variant if factor == 1 else replace(variant, title=f"{variant.title}, lr x {factor:g}", lr_factor=factor)


OPD_FASTER = faster(OPD, 1.25)


def sized(variant: Variant, student: str) -> Variant:
    """The same with another student; the medium one is the world's own, so that its runs are shared."""
    models = {} if student == "medium" else {"student_size": student}
    return replace(variant, title=f"{variant.title}, {student} student", models=models)


def taught(variant: Variant, teacher: str) -> Variant:
    """The same with another teacher; the strong one is the world's own."""
    models = {} if teacher == "strong" else {"teacher_size": teacher}
    return replace(variant, title=f"{variant.title}, {teacher} teacher", models=models)

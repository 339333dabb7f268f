"""Which objectives verl can carry, and why not the others. Nothing here imports verl.

verl's teacher says one of two things of each token. Its log-prob of the token that was written: then the loss gets advantages
(`PolicyGradient`). Or its k likeliest ids with their log-probs: then verl's logits processor makes the forward KL over them of
the student's logits, and the loss gets that sum and both models' mass on the ids (`Divergence`). Never both: with the likeliest
ids, its log-prob of a written token that is not among them is dropped, and with it the gap.
"""

from __future__ import annotations

from typing import Any

from iwopd.algo.evidence import WEIGHTS
from iwopd.algo.objectives import Divergence, Objective, PolicyGradient
from iwopd.cluster.verl.errors import VerlError
from iwopd.config import Method
from iwopd.registry import Registry

Carried = PolicyGradient | Divergence
CARRIED = (PolicyGradient.name, Divergence.name)

EVIDENCE = frozenset(
    {"mask", "gap", "old_logprobs", "teacher_logprobs", "reference_logprobs", "student_entropy", "progress", WEIGHTS}
)
"""What formulas can ask for where the teacher scores the written tokens."""
REWARDED = EVIDENCE | {"correct", "prompt"}
"""The same where a checker judges the answers (`[reward]`)."""
EVIDENCE_WITHOUT_GAP = EVIDENCE - {"gap", "teacher_logprobs"}
"""What weight rules can ask for where it sends its likeliest ids."""

_ELSE = "or train with the local engine"
LIMITS: dict[str, tuple[str, str]] = {
    "divergence": (
        "forward-kl",
        f"verl makes the forward KL of the student's logits, and shows them to no other loss: choose 'forward-kl', {_ELSE}",
    ),
    "support": ("top-k", f"verl's teacher sends its likeliest ids, never all: set it to 'top-k', {_ELSE}"),
    "support_of": ("teacher", f"verl's teacher cannot be asked for ids that the student chose: set it to 'teacher', {_ELSE}"),
}
"""Settings of a divergence: the one value that verl can carry, and why no other."""


def carried(method: Method, *, rewarded: bool = False) -> Carried:
    """The objective, if verl can carry it; else why not. `rewarded`: a checker judges the answers."""
    objective = method.made
    if objective.name not in CARRIED or not isinstance(objective, Carried):
        raise VerlError(
            f"method.objective is {objective.name!r}, and verl carries only {' and '.join(map(repr, CARRIED))}: choose one of "
            f"them, {_ELSE}"
        )
    if isinstance(objective, Divergence):
        _check_divergence(objective)
    else:
        _check_policy_gradient(objective, rewarded=rewarded)
    return objective


def _check_divergence(objective: Divergence) -> None:
    settings = objective.settings({name: getattr(objective, name) for name in LIMITS})
    for name, (value, why) in LIMITS.items():
        if name in settings and (given := getattr(objective, name)) != value:
            raise VerlError(f"method.{name} is {given!r}: {why}")
    if missing := sorted(set(objective.rule.needs) - EVIDENCE_WITHOUT_GAP):
        raise VerlError(
            f"method.weights is {objective.weights!r}, which needs {', '.join(missing)}: verl's teacher sends its likeliest "
            "ids and drops its log-prob of a written token that is not among them; choose a rule that looks at no gap, "
            f"objective {PolicyGradient.name!r}, {_ELSE}"
        )


def _check_policy_gradient(objective: PolicyGradient, *, rewarded: bool) -> None:
    if missing := sorted(objective.needs - (REWARDED if rewarded else EVIDENCE)):
        raise VerlError(
            f"the method ({objective.who}) needs {', '.join(missing)}, and verl's distillation knows only log-probs of the "
            f"written tokens, of student, teacher and reference, the student's entropy, and verdicts with [reward]: choose "
            f"another rule or advantage, {_ELSE}"
        )
    if (why := objective.needs_reward) and not rewarded:
        raise VerlError(f"{why} trains on a task reward alone, and nobody judges: set reward.checker")
    for name in ("kl_coef", "entropy_coef"):
        if value := getattr(objective, name):
            raise VerlError(
                f"method.{name} is {value}, but verl drops KL and entropy terms when it trains on the teacher alone "
                f"(use_task_rewards=false): set it to 0, {_ELSE}"
            )


def gap_is_known(objective: Objective) -> bool:
    """Whether the teacher scores the written tokens."""
    return not isinstance(objective, Divergence)


def carried_names(registry: Registry[Any], *, rewarded: bool = False) -> list[str]:
    """Weight rules or advantages that get all their evidence where the teacher scores the written tokens."""
    known = REWARDED if rewarded else EVIDENCE
    found = []
    for name in registry:
        try:
            if known.issuperset(registry[name].needs):
                found.append(name)
        except (ImportError, TypeError):  # of a package that does not load: said to whom chooses it
            continue
    return found

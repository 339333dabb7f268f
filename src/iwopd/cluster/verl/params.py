"""The method's parameters on their way to verl's workers. Nothing here imports verl, so a launch can be planned without it.

The channel is verl's own tree of settings. `distillation.distillation_loss` gets another `_target_`, our subclass of verl's
loss settings (`lossconfig.LossConfig`), and a table `iwopd` with the `[method]` section of the recipe, the number of steps,
what a task reward adds, and the limit of `rollout.mismatch_limit`.
verl saves the tree with the run, prints it, sends it to every worker and builds the class there: that is where it is validated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError

from iwopd.algo.advantages import ADVANTAGES
from iwopd.algo.objectives import Divergence, PolicyGradient
from iwopd.algo.registry import WEIGHT_RULES
from iwopd.cluster.verl.carrying import LIMITS, Carried, carried, carried_names
from iwopd.cluster.verl.compatibility import in_short, installed
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.reaches import VERL
from iwopd.config import Method, Reward
from iwopd.methods import METHODS

LOSS = "distillation.distillation_loss"
LOSS_CONFIG = "iwopd.cluster.verl.lossconfig.LossConfig"
ADDED = ("clip_ratio_c", "use_chunked_topk")
"""Settings of the loss that verl's own file of settings does not have."""
CORRECTION = "algorithm.rollout_correction"
TRAINER = "iwopd_sync"
"""verl's synchronous trainer with our hook (`trainer.py`), as a value of `trainer.v1.trainer_mode`."""
REWARD = ("checker", "coefficient", "normalize")
"""What the trainer must know of `[reward]`."""
NO_DUAL_CLIP = 1e9
"""verl's dual clip cannot be switched off. No ratio reaches this: both sides cut log-ratios at 20, and e^20 is half of it."""


@dataclass(frozen=True)
class Settings:
    """What a worker knows of the recipe."""

    method: Method
    steps: int | None = None
    """Steps of the whole run; None: as verl counts them."""
    reward: Reward | None = None
    """Who judges, and how much of it is added to the advantages; None: nobody."""
    mismatch_limit: float | None = None
    """Mean |difference| of the log-probs of rollout servers and trainer that ends the job; None: it is not looked at."""

    @property
    def objective(self) -> Carried:
        return carried(self.method, rewarded=self.reward is not None)


FORWARD_KL = "iwopd_forward_kl_top_k"
"""The name of the forward KL over the teacher's likeliest ids, with any weights."""


def presets(*, rewarded: bool = False) -> dict[str, dict[str, Any]]:
    """Losses and the `[method]` section that each stands for if there is no table `iwopd`.

    `rewarded`: also those that need a task reward, which only the table brings. All of them are registered.
    """
    rules = {_loss_name(rule): {"weights": rule} for rule in carried_names(WEIGHT_RULES, rewarded=rewarded)}
    left_out = ("opd",) if rewarded else ("opd", "none")
    others = [name for name in carried_names(ADVANTAGES, rewarded=rewarded) if name not in left_out]
    plain = {_loss_name(name): {"advantage": name} for name in others}
    weighted = {_loss_name(f"iw_{name}"): {"advantage": name, **METHODS["iw-opd"]} for name in others}
    divergence = {"objective": Divergence.name, **{name: value for name, (value, _) in LIMITS.items()}}
    return {"iw_opd": METHODS["iw-opd"], **rules, **plain, **weighted, FORWARD_KL: divergence}


def loss_mode(method: Method) -> str:
    """The name under which the method is registered, for `distillation.distillation_loss.loss_mode`."""
    if isinstance(method.made, Divergence):
        return FORWARD_KL
    advantage = method.made.advantage if isinstance(method.made, PolicyGradient) else "opd"
    if advantage != "opd":
        return _loss_name(advantage if method.weights == "uniform" else f"iw_{advantage}")
    return "iw_opd" if method.weights == "cumulative-share" else _loss_name(method.weights)


def _loss_name(name: str) -> str:
    return f"iwopd_{name.replace('-', '_')}"


def overrides(method: Method, steps: int, *, reward: Reward | None = None, mismatch_limit: float | None = None) -> list[str]:
    """All of verl's settings that the method decides, as Hydra overrides."""
    objective = carried(method, rewarded=reward is not None)
    beside = {} if reward is None else {f"reward.{name}": getattr(reward, name) for name in REWARD}
    beside |= {} if mismatch_limit is None else {"mismatch_limit": mismatch_limit}
    settings: dict[str, Any] = {
        f"{LOSS}._target_": LOSS_CONFIG,
        f"{LOSS}.loss_mode": loss_mode(method),
        **{f"{'+' if name in ADDED else ''}{LOSS}.{name}": value for name, (value, _) in loss_settings(objective).items()},
        **{f"+{LOSS}.iwopd.{name}": value for name, value in (_table(method, steps) | beside).items()},
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.use_kl_loss": objective.needs_reference,  # only so that verl scores the reference
        "actor_rollout_ref.actor.kl_loss_coef": 0.0,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        **{f"{CORRECTION}.{name}": value for name, (value, _) in correction_settings(objective).items()},
        "trainer.v1.trainer_mode": TRAINER,
    }
    return [f"{name}={literal(value)}" for name, value in settings.items()]


def loss_settings(objective: Carried) -> dict[str, tuple[Any, str]]:
    """Settings of the loss under which verl computes the objective, each with the reason."""
    wanted: dict[str, tuple[Any, str]] = {
        "use_policy_gradient": (True, "the advantages go through the clipped policy loss"),
        "use_task_rewards": (False, "the teacher is the only reward"),
        "policy_loss_mode": ("vanilla", "the clipped policy loss is the method's"),
        "loss_max_clamp": (None, "it would cut weighted advantages off"),
    }
    if isinstance(objective, Divergence):
        return wanted | {
            "use_policy_gradient": (False, "a divergence is differentiated: as an advantage it has no expected gradient"),
            "loss_max_clamp": (None, "it would cut weighted divergences off"),
            "log_prob_min_clamp": (None, "it would raise small probabilities"),
            "topk": (objective.k, "it is method.k"),
            "use_chunked_topk": (False, "it rounds the student's log-probs, and the rest is what they leave of 1"),
        }
    clips = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), (objective.clip, "it is method.clip"))
    return wanted | clips | {"clip_ratio_c": (dual_clip(objective), "it is method.dual_clip")}


def correction_settings(objective: Carried) -> dict[str, tuple[Any, str]]:
    """The same of verl's rollout correction."""
    if isinstance(objective, Divergence):
        return {"rollout_is": (None, "a divergence has no ratio to correct")}
    return {
        "rollout_is": ("token", "the rollout correction is per token"),
        "rollout_is_threshold": (objective.correction_threshold, "it is method.correction_threshold"),
    }


def check_version() -> None:
    """Refuse another verl than the one that was tested."""
    if (found := version("verl")) != VERL:
        raise VerlError(
            f"verl {found} is installed, but iwopd was tested with {VERL} alone: pip install verl=={VERL}. "
            f"{in_short(installed)} (all of it: python -m iwopd.cluster.verl.compatibility)"
        )


def dual_clip(objective: PolicyGradient) -> float:
    """The dual clip as verl's `clip_ratio_c`."""
    return NO_DUAL_CLIP if math.isinf(objective.dual_clip) else objective.dual_clip


def read_settings(name: str, table: Mapping[str, Any] | None) -> Settings:
    """The settings that a loss name and the table `iwopd` describe; both must say the same."""
    known = presets(rewarded=True)
    if name not in known:
        raise VerlError(f"{LOSS}.loss_mode is {name!r}, which is none of ours: {', '.join(known)}")
    values = dict(known[name] if table is None else table)
    steps = values.pop("steps", None)
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise VerlError(f"{LOSS}.iwopd.steps is {steps!r}; it must be a number of steps, at least 1")
    limit = values.pop("mismatch_limit", None)
    if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
        raise VerlError(f"{LOSS}.iwopd.mismatch_limit is {limit!r}; it must be a positive number (rollout.mismatch_limit)")
    given = values.pop("reward", None)
    try:
        reward = None if given is None else Reward.model_validate(given)
        method = Method.model_validate(values)
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")) for fault in error.errors()]
        text = "; ".join(f"{place}: {message}" if place else message for place, message in faults)
        raise VerlError(f"{LOSS}.iwopd: {text}") from None
    carried(method, rewarded=reward is not None)
    if loss_mode(method) != loss_mode(Method.model_validate(known[name])):
        raise VerlError(
            f"{LOSS}.loss_mode is {name!r}, but the table iwopd beside it describes {loss_mode(method)!r} (weights "
            f"{method.weights!r}): make them agree, or leave the table out"
        )
    return Settings(method, steps, reward, limit)


def _table(method: Method, steps: int) -> dict[str, Any]:
    values = method.model_dump(mode="python") | {"steps": steps}
    params = values.pop("params")
    return values | ({f"params.{name}": value for name, value in params.items()} or {"params": {}})


def literal(value: Any) -> str:
    """A value in Hydra's grammar of overrides."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return repr(value)  # also inf, -inf and nan
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(literal(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{literal(item)}" for name, item in value.items()) + "}"
    plain = str(value)
    reserved = plain.lower() in ("true", "false", "null", "none", "inf", "nan")
    readable = re.fullmatch(r"[A-Za-z_/][\w./-]*", plain) and not reserved
    return plain if readable else json.dumps(plain, ensure_ascii=False)

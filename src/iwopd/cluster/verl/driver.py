"""What the driver refuses before Ray starts: settings under which verl would train with another method than the recipe's."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.losses import settings_of
from iwopd.cluster.verl.params import CORRECTION, LOSS, LOSS_CONFIG, TRAINER, Settings, check_version, correction_settings


def check_driver(config: DictConfig) -> Settings:
    """Refuse a tree of verl's settings that does not stand for a method of ours; return the method it stands for."""
    check_version()
    if not config.distillation.enabled:
        raise VerlError("distillation.enabled is false: without a teacher there is nothing to distill; set it to true")
    settings = settings_of(loss_config(config))
    objective = settings.objective
    wanted: dict[str, tuple[Any, str]] = {
        "trainer.use_v1": (True, "the older trainer knows no hook before the split"),
        "trainer.v1.trainer_mode": (TRAINER, "verl's synchronous trainer with our hook"),
        "actor_rollout_ref.actor.loss_agg_mode": ("token-mean", "one denominator for all tokens of an update"),
        "actor_rollout_ref.rollout.temperature": (1.0, "verl's teachers score at temperature 1"),
        "actor_rollout_ref.rollout.calculate_log_probs": (True, "the rollout correction needs the engine's own log-probs"),
        "algorithm.use_kl_in_reward": (False, "the teacher is the only reward"),
        f"{CORRECTION}.bypass_mode": (False, "it takes the engine's log-probs for the trainer's own, which make the gap"),
        **{f"{CORRECTION}.{name}": value for name, value in correction_settings(objective).items()},
        f"{CORRECTION}.rollout_is_batch_normalize": (False, "the factors are used as they are"),
        f"{CORRECTION}.rollout_rs": (None, "rejected tokens would stay in the loss's denominator"),
        "actor_rollout_ref.actor.use_kl_loss": (
            objective.needs_reference,
            "with it verl scores the reference, which is there for the methods that need it and nothing else",
        ),
    }
    for name, (value, why) in wanted.items():
        if (given := OmegaConf.select(config, name)) != value:
            raise VerlError(f"{name} is {given!r}; it must be {value!r}: {why}")
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in ("fsdp", "fsdp2"):
        raise VerlError(
            f"actor_rollout_ref.actor.strategy is {strategy!r}; fsdp and fsdp2 were checked to hand whole rollouts to "
            "the loss, the others were not: use fsdp2"
        )
    return settings


def loss_config(config: DictConfig) -> Any:
    """The settings of the loss, built as every worker will build them."""
    section: Any = OmegaConf.to_container(config.distillation.distillation_loss, resolve=True)
    if (target := section.pop("_target_", None)) != LOSS_CONFIG:
        raise VerlError(f"{LOSS}._target_ is {target!r}; it must be {LOSS_CONFIG!r}, which carries the method to the workers")
    from iwopd.cluster.verl.lossconfig import LossConfig

    return LossConfig(**section)

"""verl's tensors to evidence and back: the objective as verl's distillation loss.

verl calls the loss once per micro-batch, which holds whole rollouts (rows are dealt out, never cut; sequence-parallel ranks
gather their log-probs first), and takes what it returns as `-advantages` of its clipped policy loss. Two of its tensors matter:
`teacher_logprobs`, prompt and response in one row with entry t about token t + 1, and `old_log_probs`, the response's
log-probs under the policy at the start of the step, scored by the trainer. Those of the policy that is being updated
(`model_output`) are not part of the gap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import Objective, TrainingSignal
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.params import LOSS, Settings, dual_clip, read_settings

ADVANTAGES = "iwopd_advantages"
"""Column of the batch in which the hook leaves the advantages that must be computed before the split."""

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


def make_loss(name: str) -> Loss:
    """The loss registered as `name`."""

    def loss(config: Any, distillation_config: Any, model_output: Any, data: Any) -> tuple[Tensor, dict[str, Any]]:
        """`-advantages` [B, T], and metrics of this micro-batch."""
        loss_config = distillation_config.distillation_loss
        settings = settings_of(loss_config)
        check_loss_config(loss_config, settings)
        if config.loss_agg_mode != "token-mean":
            raise VerlError(
                f"actor_rollout_ref.actor.loss_agg_mode is {config.loss_agg_mode!r}; the method's loss is a mean over all "
                "tokens of the update: set it to 'token-mean'"
            )
        pad_rollout_weights(data)
        if ADVANTAGES in data:
            return -padded(data[ADVANTAGES]), {}
        objective = settings.objective
        if reason := objective.needs_whole_batch:
            raise VerlError(
                f"the weight rule {objective.weights!r} cannot be computed in verl's loss, which sees one micro-batch: "
                f"{reason}. Start the job with `iwopd train --engine verl` or `python -m iwopd.cluster.verl.main`, whose "
                "trainer computes it before the split"
            )
        signal = objective.signal(batch_evidence(data, objective))
        return -signal.advantages, _metrics(signal)

    loss.__name__ = loss.__qualname__ = name
    return loss


def batch_evidence(data: Any, objective: Objective, progress: float | None = None) -> Evidence:
    """The evidence that the objective asks for, of a batch that is ragged or padded, whole or a part of it; in float32."""
    from verl.workers.utils.padding import no_padding_2_padding

    for name, remedy in (_NEEDED | (_REFERENCE if objective.needs_reference else {})).items():
        if name not in data:
            raise VerlError(f"the batch has no {name!r}, and the method is made from it: {remedy}")
    return Evidence(
        teacher_logprobs=no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1).float(),
        old_logprobs=padded(data["old_log_probs"]).float(),
        mask=padded(data["response_mask"]).bool(),
        reference_logprobs=padded(data["ref_log_prob"]).float() if objective.needs_reference else None,
        progress=progress,
    )


_NEEDED = {
    "teacher_logprobs": "set distillation.enabled=true and name a teacher",
    "old_log_probs": "they are scored by the trainer before the update; use verl's synchronous trainer (trainer.use_v1=true)",
    "response_mask": "verl's agent loop writes it",
}
_REFERENCE = {
    "ref_log_prob": "verl scores the reference (the student's first weights) only with "
    "actor_rollout_ref.actor.use_kl_loss=true (and kl_loss_coef=0)"
}


def padded(values: Tensor) -> Tensor:
    """[B, T], right-padded with 0, of a ragged or padded tensor of the response."""
    return values.to_padded_tensor(0) if values.is_nested else values


def pad_rollout_weights(data: Any) -> None:
    """Pad the rollout correction's factors in place.

    verl 0.9.1 pads everything that its distillation loss multiplies but these, so that `rollout_is=token` ends in an error
    about nested tensors. It reads them after the loss function has run, which makes this the one place to mend it from outside.
    """
    weights = data.get("rollout_is_weights", None)
    if weights is not None and weights.is_nested:
        data["rollout_is_weights"] = padded(weights)


def settings_of(loss_config: Any) -> Settings:
    """The settings in verl's loss settings: those of our own class, or the name's own with verl's class."""
    settings = getattr(loss_config, "settings", None)
    return settings if isinstance(settings, Settings) else _preset(loss_config.loss_mode)


@lru_cache
def _preset(name: str) -> Settings:
    return read_settings(name, None)


def check_loss_config(loss_config: Any, settings: Settings) -> None:
    """Refuse settings beside the loss's name under which verl would compute something else."""
    method = settings.objective
    wanted: dict[str, tuple[Any, str]] = {
        "use_policy_gradient": (True, "the advantages go through the clipped policy loss"),
        "use_task_rewards": (False, "the teacher is the only reward"),
        "policy_loss_mode": ("vanilla", "the clipped policy loss is the method's"),
        "loss_max_clamp": (None, "it would cut weighted advantages off"),
        "clip_ratio_low": (method.clip, "it is method.clip"),
        "clip_ratio_high": (method.clip, "it is method.clip"),
    }
    for name, (value, why) in wanted.items():
        if getattr(loss_config, name) != value:
            raise VerlError(f"{LOSS}.{name} is {getattr(loss_config, name)!r}; it must be {value!r}: {why}")
    cap = loss_config.get("clip_ratio_c", 3.0)  # verl's own default where its class has no such field
    if cap != dual_clip(method):
        raise VerlError(f"{LOSS}.clip_ratio_c is {cap!r}; it must be {dual_clip(method)!r}: it is method.dual_clip")


def _metrics(signal: TrainingSignal) -> dict[str, Any]:
    from verl.utils.metric import AggregationType, Metric

    if not signal.mask.any():  # nothing but filler rows
        return {}
    weights, gap = signal.weights[signal.mask], signal.gap[signal.mask]
    return {
        "distillation/weights_min": Metric(AggregationType.MIN, weights.min()),
        "distillation/weights_max": Metric(AggregationType.MAX, weights.max()),
        "distillation/weights_mean": Metric(AggregationType.MEAN, weights.mean()),
        "distillation/abs_gap": Metric(AggregationType.MEAN, gap.abs().mean()),
    }

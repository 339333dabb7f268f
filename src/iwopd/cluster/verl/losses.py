"""verl's tensors to evidence and back: the objective as verl's distillation loss.

verl calls the loss once per micro-batch, which holds whole rollouts (rows are dealt out, never cut; sequence-parallel ranks
gather their log-probs first). Of a policy gradient it takes what the loss returns as `-advantages` of its clipped policy loss,
of a divergence as each token's loss, of which it takes the mean. `teacher_logprobs` hold prompt and response in one row with
entry t about token t + 1; `old_log_probs` are the response's under the policy at the start of the step, scored by the trainer.
Those of the policy that is being updated (`model_output`) are not part of the gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from iwopd.algo.divergences import DivergenceKind
from iwopd.algo.evidence import Evidence
from iwopd.algo.loss import DUAL_CLIP
from iwopd.algo.objectives import Divergence, TrainingSignal
from iwopd.algo.views import REST_FLOOR
from iwopd.cluster.verl.carrying import Carried, gap_is_known
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.params import LOSS, Settings, loss_settings, read_settings

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


def signal_column(objective: Carried) -> str:
    """Column of the batch in which the hook leaves what must be computed before the split."""
    return "iwopd_weights" if isinstance(objective, Divergence) else "iwopd_advantages"


def make_loss(name: str) -> Loss:
    """The loss registered as `name`."""

    def loss(config: Any, distillation_config: Any, model_output: Any, data: Any) -> tuple[Tensor, dict[str, Any]]:
        """`-advantages`, or the weighted divergence with its graph, [B, T]; and metrics of this micro-batch."""
        loss_config = distillation_config.distillation_loss
        settings = settings_of(loss_config)
        check_loss_config(loss_config, settings)
        if config.loss_agg_mode != "token-mean":
            raise VerlError(
                f"actor_rollout_ref.actor.loss_agg_mode is {config.loss_agg_mode!r}; the method's loss is a mean over all "
                "tokens of the update: set it to 'token-mean'"
            )
        pad_rollout_weights(data)
        objective = settings.objective
        if settings.reward is not None and signal_column(objective) not in data:
            raise VerlError(
                "[reward] is added to the advantages before the batch is split, and this batch has no column of them: start "
                "the job with `iwopd train --engine verl` or `python -m iwopd.cluster.verl.main`"
            )
        factors, metrics = _factors(data, objective)
        if isinstance(objective, Divergence):
            return factors * forward_kl(model_output, data), metrics
        return -factors, metrics

    loss.__name__ = loss.__qualname__ = name
    return loss


def _factors(data: Any, objective: Carried) -> tuple[Tensor, dict[str, Any]]:
    """Advantages, or weights of a divergence, [B, T]: from the hook's column, else of this micro-batch, with metrics."""
    if (column := signal_column(objective)) in data:
        return padded(data[column]), {}
    if reason := objective.needs_whole_batch:
        raise VerlError(
            f"the weight rule {objective.weights!r} cannot be computed in verl's loss, which sees one micro-batch: "
            f"{reason}. Start the job with `iwopd train --engine verl` or `python -m iwopd.cluster.verl.main`, whose "
            "trainer computes it before the split"
        )
    signal = objective.signal(batch_evidence(data, objective))
    return signal.weights if isinstance(objective, Divergence) else signal.advantages, _metrics(signal, objective)


def forward_kl(model_output: Any, data: Any) -> Tensor:
    """The forward KL [B, T] over the teacher's likeliest ids and one bucket for the rest, with its graph.

    verl's logits processor has summed `q (log q - log p)` over the ids, and gives both models' mass there. What they leave of 1
    is the bucket: in float32, so of a rest below 1e-6 little is right but its order.
    """
    from verl.workers.utils.padding import no_padding_2_padding

    names = ("distillation_losses", "student_mass", "teacher_mass")
    if lost := [name for name in names if name not in model_output]:
        raise VerlError(f"verl's engine gave no {lost[0]!r}: use actor_rollout_ref.actor.strategy=fsdp2, without fused kernels")
    found: list[Tensor] = [no_padding_2_padding(model_output[name], data) for name in names]
    ids, student, teacher = found
    return ids + DivergenceKind("forward-kl").terms(_log_rest(student), _log_rest(teacher)).values


def _log_rest(mass: Tensor) -> Tensor:
    """Clamped before the logarithm: its derivative at 0 times the clamp's would be NaN."""
    return (1.0 - mass.float()).clamp(min=math.exp(REST_FLOOR)).log()


def batch_columns(objective: Carried) -> tuple[str, ...]:
    """The columns of a batch that hold the evidence that the objective asks for."""
    return tuple(_COLUMNS[name][0] for name in _asked(objective))


def batch_evidence(data: Any, objective: Carried, progress: float | None = None) -> Evidence:
    """The evidence that the objective asks for, of a batch that is ragged or padded, whole or a part of it; in float32."""
    from verl.workers.utils.padding import no_padding_2_padding

    found = {}
    for name in _asked(objective):
        column, remedy = _COLUMNS[name]
        if column not in data:
            raise VerlError(f"the batch has no {column!r}, and the method is made from it: {remedy}")
        values = data[column]
        found[name] = no_padding_2_padding(values, data).squeeze(-1) if name == "teacher_logprobs" else padded(values)
    mask = found.pop("mask").bool()
    known: dict[str, Any] = {name: values.float() for name, values in found.items()}
    # Without the teacher's log-probs there is no gap. It counts as 0, and nobody asks for it: see `carrying`.
    known.setdefault("teacher_logprobs", known["old_logprobs"])
    return Evidence(mask=mask, progress=progress, **known)


def _asked(objective: Carried) -> list[str]:
    return [name for name in _COLUMNS if name in objective.needs and (name != "teacher_logprobs" or gap_is_known(objective))]


_COLUMNS = {
    "teacher_logprobs": ("teacher_logprobs", "set distillation.enabled=true and name a teacher"),
    "old_logprobs": (
        "old_log_probs",
        "they are scored by the trainer before the update; use verl's synchronous trainer (trainer.use_v1=true)",
    ),
    "mask": ("response_mask", "verl's agent loop writes it"),
    "reference_logprobs": (
        "ref_log_prob",
        "verl scores the student's first weights only with actor_rollout_ref.actor.use_kl_loss=true (and kl_loss_coef=0)",
    ),
    "student_entropy": ("entropy", "verl's trainer writes it with the old log-probs; use its synchronous trainer"),
}
"""Evidence by name: verl's column, and what to do if there is none."""


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
    for name, (value, why) in loss_settings(settings.objective).items():
        given = loss_config.get(name, DUAL_CLIP)  # verl's class has no field for its dual clip, and its policy loss a default
        if given != value:
            raise VerlError(f"{LOSS}.{name} is {given!r}; it must be {value!r}: {why}")


def _metrics(signal: TrainingSignal, objective: Carried) -> dict[str, Any]:
    from verl.utils.metric import AggregationType, Metric

    if not signal.mask.any():  # nothing but filler rows
        return {}
    weights, gap = signal.weights[signal.mask], signal.gap[signal.mask]
    known = {"distillation/abs_gap": Metric(AggregationType.MEAN, gap.abs().mean())} if gap_is_known(objective) else {}
    return known | {
        "distillation/weights_min": Metric(AggregationType.MIN, weights.min()),
        "distillation/weights_max": Metric(AggregationType.MAX, weights.max()),
        "distillation/weights_mean": Metric(AggregationType.MEAN, weights.mean()),
    }

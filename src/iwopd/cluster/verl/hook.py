"""What must be known before a batch is split, computed in the one place that sees it whole: verl's trainer.

Between the scoring and the update, verl's synchronous trainer holds the step's whole batch in its TransferQueue, one row a
rollout. Our subclass of it adds the signal there: advantages in a column of their own for the rules that need the batch, the
progress or another denominator (verl divides by the sum of `loss_mask`), and for all rules the metrics that the local engine
has. The worker's loss then reads the column. `register_trainer` is verl's own way to bring another trainer.
"""

from __future__ import annotations

from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_to_nested

from iwopd.algo.registry import WEIGHT_RULES
from iwopd.algo.signal import TrainingSignal
from iwopd.cluster.verl.losses import ADVANTAGES, batch_signal, settings_of
from iwopd.cluster.verl.params import TRAINER, Settings
from iwopd.cluster.verl.watch import Watch, rollout_actors
from iwopd.train.metrics import signal_metrics, training_progress

COLUMNS = ("prompts", "responses", "response_mask", "old_log_probs", "teacher_logprobs", "ref_log_prob")


@register_trainer(TRAINER)
class Trainer(PPOTrainerSync):  # type: ignore[misc]  # verl has no types
    """verl's synchronous trainer, which computes the signal of every batch."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # the mode that this is in all else; verl compares names
        super().__init__(config)
        Watch(self.replay_buffer, lambda: rollout_actors(self), config.actor_rollout_ref.rollout.n)
        self.iwopd_settings = settings_of(omega_conf_to_dataclass(config.distillation.distillation_loss))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(COLUMNS))
        settings = self.iwopd_settings
        progress = training_progress(self.global_steps, settings.steps or self.total_training_steps)
        columns, numbers = before_the_split(data, settings, progress)
        metrics.update(numbers)
        if columns:
            fields = TensorDict(columns, batch_size=len(batch))
            batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch


def before_the_split(data: Any, settings: Settings, progress: float) -> tuple[dict[str, Any], dict[str, float]]:
    """New columns of a whole batch, ragged like `response_mask`, and its metrics by name."""
    signal = batch_signal(data, settings, progress)
    columns = {}
    if settings.whole_batch:
        columns[ADVANTAGES] = response_to_nested(signal.advantages, data["response_mask"])
        if WEIGHT_RULES[settings.method.weights].supervised is not None:
            columns["loss_mask"] = response_to_nested(signal.supervised.to(data["response_mask"].dtype), data["response_mask"])
    return columns, _metrics(signal, progress)


def _metrics(signal: TrainingSignal, progress: float) -> dict[str, float]:
    """The local engine's numbers about gap and weights; lists become one entry a bin, because verl logs numbers only."""
    numbers: dict[str, float] = {"iwopd/progress": progress, "iwopd/tokens": float(signal.supervised.sum())}
    for name, value in signal_metrics(signal).items():
        if isinstance(value, list):
            numbers |= {f"iwopd/{name}/{place}": item for place, item in enumerate(value)}
        else:
            numbers[f"iwopd/{name}"] = value
    return numbers


class TaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's own, which finds our trainer registered."""

    def run(self, config: DictConfig) -> None:
        import iwopd.cluster.verl.hook  # noqa: F401  # Ray may have sent this class without its module

        super().run(config)


def task_runner() -> Any:
    """The Ray actor class for `run_ppo`."""
    return ray.remote(TaskRunner)

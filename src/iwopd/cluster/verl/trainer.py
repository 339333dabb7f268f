"""verl's synchronous trainer with our hook.

Between scoring and update it holds the whole batch of a step in its TransferQueue, one row per rollout; the loss sees only
micro-batches. `register_trainer` and a custom task runner are verl's interface for custom trainers.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import register_trainer
from verl.utils.config import omega_conf_to_dataclass

from iwopd.cluster.verl.hook import JUDGED, Verdicts, before_the_split
from iwopd.cluster.verl.losses import batch_columns, settings_of
from iwopd.cluster.verl.params import TRAINER
from iwopd.cluster.verl.stopping import StoppingTrainer
from iwopd.cluster.verl.sync import check_sync
from iwopd.cluster.verl.watch import Watch, rollout_actors
from iwopd.train.scoring import training_progress

COLUMNS = ("prompts", "responses", "rollout_log_probs")
"""Read of every batch beside the objective's evidence."""


@register_trainer(TRAINER)
class Trainer(StoppingTrainer):
    """Adds the signal to every batch, after verl's scoring and before its update."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares names, and apart from the hook this is its sync mode
        super().__init__(config)
        Watch(self.replay_buffer, lambda: rollout_actors(self), config.actor_rollout_ref.rollout.n, self.leave_if_asked)
        self.iwopd_told = False
        self.iwopd_settings = settings_of(omega_conf_to_dataclass(config.distillation.distillation_loss))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        settings = self.iwopd_settings
        fields = [*COLUMNS, *batch_columns(settings.objective), *(JUDGED if settings.reward is not None else ())]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        progress = training_progress(self.global_steps, settings.steps or self.total_training_steps)
        verdicts = None if settings.reward is None else self._verdicts(data)
        columns, numbers = before_the_split(data, settings, progress, verdicts)
        metrics.update(numbers)
        check_sync(batch.tags, numbers, settings, self.global_steps)
        if columns:
            new = TensorDict(columns, batch_size=len(batch))
            batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=new)
        return batch

    def _verdicts(self, data: Any) -> Verdicts:
        """Those of the batch; why there is none goes to the log, once."""
        found = Verdicts.of(data)
        if found.failures and not self.iwopd_told:
            self.iwopd_told = True
            missing = f"no verdict on {len(found.failures)} of {len(found.judged)} answers"
            print(f"step {self.global_steps}: {missing}, such as: {found.failures[0]}")
        return found


class TaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's own, with our trainer registered."""

    def run(self, config: DictConfig) -> None:
        import iwopd.cluster.verl.trainer  # noqa: F401  # Ray may have sent this class without its module

        super().run(config)

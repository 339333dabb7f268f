"""verl's synchronous trainer with our hook, and with an end on request.

Between scoring and update it holds the whole batch of a step in its TransferQueue, one row per rollout; the loss sees only
micro-batches. `register_trainer` and a custom task runner are verl's interface for custom trainers.

Asked to end (`stops.py`), it leaves a step whose update has not begun, finishes one whose update has, saves the newest finished
step if that is not saved yet, and raises `StopAskedError`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.config import omega_conf_to_dataclass

from iwopd.cluster.verl.hook import before_the_split
from iwopd.cluster.verl.losses import batch_columns, settings_of
from iwopd.cluster.verl.params import TRAINER
from iwopd.cluster.verl.stops import StopAskedError, StopFile
from iwopd.cluster.verl.watch import Watch, rollout_actors
from iwopd.train.scoring import training_progress

COLUMNS = ("prompts", "responses", "rollout_log_probs")
"""Read of every batch beside the objective's evidence."""


@register_trainer(TRAINER)
class Trainer(PPOTrainerSync):  # type: ignore[misc]  # verl has no types
    """Adds the signal to every batch, after verl's scoring and before its update."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares names, and apart from the hook this is its sync mode
        super().__init__(config)
        self.iwopd_stop = StopFile.of_this_job()
        self.iwopd_saved = 0
        self.iwopd_position: Any = None
        self.iwopd_training, self.iwopd_awake = False, True
        Watch(self.replay_buffer, lambda: rollout_actors(self), config.actor_rollout_ref.rollout.n, self._leave_if_asked)
        self.iwopd_settings = settings_of(omega_conf_to_dataclass(config.distillation.distillation_loss))

    def fit(self, agent_loop_manager: Any) -> None:
        self.iwopd_saved = self.global_steps
        try:
            super().fit(agent_loop_manager)
        except StopAskedError:
            self._save_newest()
            raise

    def prepare_step(self) -> Any:
        """Notes the position in the data before the step's prompts are fetched: it belongs to the step before."""
        if self.train_dataloader_it is not None:
            self.iwopd_position = self.train_dataloader.state_dict()
        self._leave_if_asked()
        self.iwopd_training = True
        return super().prepare_step()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        batch = super().step(metrics, timing_raw)
        if self._asked():
            self.config.trainer.save_freq = 1  # verl saves now, logs the step, and comes to the next `prepare_step`
        return batch

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.iwopd_awake = False

    def on_step_end(self) -> None:
        if self._last_step() or not self._asked():  # else nobody will sample with these weights
            super().on_step_end()
            self.iwopd_awake = True

    def _validate(self) -> Any:
        """An evaluation is left, too: a resume makes up for it. Not that of the last step, which no resume follows."""
        if self.iwopd_training and self._last_step():
            self.iwopd_stop = None
        try:
            self._leave_if_asked()
            return super()._validate()
        except StopAskedError:
            if not self.iwopd_training:
                raise
            return {}

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._leave_if_asked()
        return super()._compute_old_log_prob(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._leave_if_asked()
        return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self.iwopd_saved = self.global_steps

    def _save_newest(self) -> None:
        """Save the step before the one that was left, with its position in the data, if it is not saved yet."""
        if (done := self.global_steps - 1) <= self.iwopd_saved:
            return
        if self.iwopd_awake:  # the engines' memory, which a save may need
            try:
                self.checkpoint_manager.abort_replicas()
                self.checkpoint_manager.sleep_replicas()
            except Exception as error:  # saving is worth a try even so
                print(f"the rollout engines could not be put to sleep: {error!r}", flush=True)
        self.global_steps = done
        self.train_dataloader = SimpleNamespace(state_dict=lambda: self.iwopd_position)
        self._save_checkpoint()

    def _leave_if_asked(self) -> None:
        if name := self._asked():
            raise StopAskedError(f"stopped by {name}")

    def _asked(self) -> str:
        return self.iwopd_stop.asked() if self.iwopd_stop is not None else ""

    def _last_step(self) -> bool:
        return bool(self.global_steps >= self.total_training_steps)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        settings = self.iwopd_settings
        fields = [*COLUMNS, *batch_columns(settings.objective)]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        progress = training_progress(self.global_steps, settings.steps or self.total_training_steps)
        columns, numbers = before_the_split(data, settings, progress)
        metrics.update(numbers)
        if columns:
            new = TensorDict(columns, batch_size=len(batch))
            batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=new)
        return batch


class TaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's own, with our trainer registered."""

    def run(self, config: DictConfig) -> None:
        import iwopd.cluster.verl.trainer  # noqa: F401  # Ray may have sent this class without its module

        super().run(config)

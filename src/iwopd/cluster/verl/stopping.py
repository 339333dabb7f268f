"""verl's synchronous trainer, which ends on request (`stops.py`) with its newest finished step saved.

It leaves a step whose update has not begun, finishes one whose update has, saves the newest finished step if that is not saved
yet, and raises `StopAskedError`.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import PPOTrainerSync

from iwopd.cluster.verl.stops import StopAskedError, StopFile


class StoppingTrainer(PPOTrainerSync):  # type: ignore[misc]  # verl has no types
    """Looks at the stop file wherever a step can be left."""

    global_steps: int
    """The step under way; verl's own."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.iwopd_stop = StopFile.of_this_job()
        self.iwopd_saved = 0
        self.iwopd_position: Any = None
        self.iwopd_training, self.iwopd_awake = False, True

    def fit(self, agent_loop_manager: Any) -> None:
        self.iwopd_saved = self.global_steps
        try:
            super().fit(agent_loop_manager)
        except StopAskedError:
            self._save_newest()
            raise

    def prepare_step(self) -> Any:
        """Notes the position in the data before the step's prompts are fetched: it belongs to the step before.

        A step whose update had begun is logged by now, so this is where it ends.
        """
        if self.train_dataloader_it is not None:
            self.iwopd_position = deepcopy(self.train_dataloader.state_dict())
        self.leave_if_asked()
        self.iwopd_training = True
        return super().prepare_step()

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
            self.leave_if_asked()
            return super()._validate()
        except StopAskedError:
            if not self.iwopd_training:
                raise
            return {}

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.leave_if_asked()
        return super()._compute_old_log_prob(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.leave_if_asked()
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

    def leave_if_asked(self) -> None:
        if name := self._asked():
            raise StopAskedError(f"stopped by {name}")

    def _asked(self) -> str:
        return self.iwopd_stop.asked() if self.iwopd_stop is not None else ""

    def _last_step(self) -> bool:
        return bool(self.global_steps >= self.total_training_steps)

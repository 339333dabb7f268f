"""verl's own loop, position in the data and saving, asked to stop at every point.

Workers, servers and queue are stand-ins here; whole jobs are stopped in tests/cluster/test_stops.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from iwopd.cluster.verl.stops import StopAskedError, StopFile
from iwopd.cluster.verl.watch import Watch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl imports what Ray calls old
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from iwopd.cluster.verl.stopping import StoppingTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata's
STEPS, PROMPTS = 5, 2


class Run:
    """A trainer whose stages only note that they ran; `when` is the stage and the step at which the stop is asked."""

    def __init__(self, folder: Path, when: tuple[str, int], *, every: int = 100, evaluate: int = -1, resume: int = 0) -> None:
        self.when, self.stop = when, StopFile(folder / "metrics-001.jsonl")
        self.stop.clear()
        self.did: list[tuple[str, int]] = []
        self.logged: list[int] = []
        self.fetched: list[list[int]] = []
        trainer = self.trainer = StoppingTrainer.__new__(StoppingTrainer)
        setting = {
            "data": {"train_batch_size": PROMPTS},
            "actor_rollout_ref": {"rollout": {"temperature": 1.0, "n": 1}, "actor": {"checkpoint": {}}},
            "trainer": {
                "project_name": "",
                "experiment_name": "",
                "logger": [],
                "total_epochs": 1,
                "critic_warmup": 0,
                "save_freq": every,
                "test_freq": evaluate,
                "val_before_train": False,
                "default_hdfs_dir": None,
                "default_local_dir": str(folder / "checkpoints"),
            },
            "global_profiler": {"steps": None, "profile_continuous_steps": False},
        }
        attributes = {
            "config": OmegaConf.create(setting),
            "parameter_sync_step": 1,
            "trainer_mode": "sync",
            "global_steps": resume,
            "total_training_steps": STEPS,
            "steps_per_epoch": STEPS,
            "train_dataloader": loader(),
            "train_dataloader_it": None,
            "use_critic": False,
            "use_reference_policy": False,
            "reward_loop_manager": SimpleNamespace(reward_loop_worker_handles=[]),
            "replay_buffer": self,
            "checkpoint_manager": self,
            "actor_rollout_wg": self,
            "checkpoint_callback": SimpleNamespace(on_save=lambda **_: None),
        }
        for name, value in attributes.items():
            setattr(trainer, name, value)
        trainer.iwopd_stop = self.stop
        trainer.iwopd_saved, trainer.iwopd_position = 0, None
        trainer.iwopd_training, trainer.iwopd_awake = False, True
        Watch(self, dict, 1, trainer.leave_if_asked)

    def note(self, stage: str) -> None:
        """A stage begins."""
        step = self.trainer.global_steps
        self.did.append((stage, step))
        if (stage, step) == self.when:
            self.stop.ask("SIGTERM")

    # What verl calls on the replay buffer, the checkpoint manager and the workers.

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        self.note("rollouts")
        for _ in range(3):
            self._wait_for_next_poll("train", 0.0)
        names = [f"{row}_0_0" for row in range(batch_size)]
        return KVBatchMeta(partition_id="train", keys=names, tags=[{}] * batch_size, extra_info={}), {}

    def _wait_for_next_poll(self, partition_id: str, last: float) -> float:
        return last

    def update_weights(self, step: int) -> None:
        self.note("sync")

    def sleep_replicas(self) -> None:
        self.note("sleep")

    def abort_replicas(self) -> None:
        self.note("abort")

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        self.note("save")
        Path(path).mkdir(parents=True)

    def fit(self) -> None:
        self.trainer.fit(SimpleNamespace())

    @property
    def saved(self) -> list[int]:
        folder = Path(self.trainer.config.trainer.default_local_dir)
        return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def loader() -> Any:
    """Prompts 0, 1 for step 1, 2, 3 for step 2, and so on, as verl would load them."""
    rows = [{"raw_prompt": str(row), "row": torch.tensor([row])} for row in range(STEPS * PROMPTS)]
    return StatefulDataLoader(rows, batch_size=PROMPTS, num_workers=0, drop_last=True, collate_fn=trainer_base.collate_fn)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs Ray, workers or the queue, below our own methods."""

    def stage(name: str, answer: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(self: Any, *arguments: Any, **_: Any) -> Any:
            self.replay_buffer.note(name)
            return answer(arguments[0] if arguments else None)

        return run

    def fetch(self: Any) -> None:
        self.replay_buffer.fetched.append(self._fetch_one_gen_batch()["row"].flatten().tolist())

    base = trainer_base.PPOTrainer
    for name, word in (("_compute_old_log_prob", "old"), ("_compute_advantage", "adv"), ("_update_actor", "update")):
        monkeypatch.setattr(base, name, stage(word, lambda batch: batch))
    monkeypatch.setattr(base, "_balance_batch", lambda self, batch, **_: batch)
    monkeypatch.setattr(base, "_add_batch_to_generate", fetch)

    def validate(self: Any) -> dict[str, float]:
        self.replay_buffer.note("evaluate")
        self.leave_if_asked()  # as the polls for its answers do
        return {"val": 1.0}

    monkeypatch.setattr(base, "_validate", validate)
    monkeypatch.setattr(base, "_compute_metrics", stage("metrics", lambda _: None))
    monkeypatch.setattr(base, "_shutdown_dump_executor", lambda self: None)
    monkeypatch.setattr(trainer_base.tq, "kv_clear", lambda **_: None)
    monkeypatch.setattr(trainer_base.SkipManager, "init", lambda config: None)
    for name in ("ValidationGenerationsLogger", "DapoFilteredRewardTableLogger"):
        monkeypatch.setattr(trainer_base, name, lambda **_: None)


def stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run it until the stop."""
    log = SimpleNamespace(log=lambda data, step: run.logged.append(step))
    monkeypatch.setattr(trainer_base, "Tracking", lambda **_: log)
    with pytest.raises(StopAskedError, match="stopped by SIGTERM"):
        run.fit()
    return run


def next_prompts(run: Run, step: int) -> list[int]:
    """What a resumed run fetches first, by verl's own state of its loader."""
    again = loader()
    state = Path(run.trainer.config.trainer.default_local_dir) / f"global_step_{step}" / "data.pt"
    again.load_state_dict(torch.load(state, weights_only=False))
    return next(iter(again))["row"].flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", ["rollouts", "old", "adv"])
def test_a_step_without_an_update_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """The step before it is saved, with the prompts of the one that was left still to come."""
    run = stopped(Run(tmp_path, (stage, 3)), monkeypatch)
    assert run.saved == [2]
    assert run.logged == [1, 2]
    assert ("update", 3) not in run.did
    assert run.fetched == [[0, 1], [2, 3], [4, 5]]
    assert next_prompts(run, 2) == [4, 5]
    assert (("abort", 3) in run.did) == (stage == "rollouts")  # later the engines sleep already


@pytest.mark.parametrize("stage", ["update", "sync", "metrics"])
def test_a_step_with_an_update_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    run = stopped(Run(tmp_path, (stage, 3)), monkeypatch)
    assert run.saved == [3]
    assert run.logged == [1, 2, 3]
    assert next_prompts(run, 3) == [6, 7]
    assert ("rollouts", 4) not in run.did


def test_what_is_saved_is_not_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(Run(tmp_path, ("rollouts", 4), every=3), monkeypatch)
    assert run.saved == [3]
    assert [entry for entry in run.did if entry[0] == "save"] == [("save", 3)]
    assert next_prompts(run, 3) == [6, 7]


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped(Run(tmp_path, ("rollouts", 1)), monkeypatch).saved == []
    assert stopped(Run(tmp_path, ("rollouts", 3), resume=2), monkeypatch).saved == []


def test_an_evaluation_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(Run(tmp_path, ("evaluate", 2), evaluate=2), monkeypatch)
    assert (run.saved, run.logged) == ([2], [1, 2])
    assert next_prompts(run, 2) == [4, 5]


@pytest.mark.parametrize("stage", ["update", "sync", "evaluate"])
def test_the_last_step_ends_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """It has the weights of its update in the engines, its evaluation and its checkpoint; the job is no stopped one."""
    run = Run(tmp_path, (stage, STEPS), evaluate=STEPS)
    monkeypatch.setattr(trainer_base, "Tracking", lambda **_: SimpleNamespace(log=lambda data, step: run.logged.append(step)))
    run.fit()
    assert (run.saved, run.logged) == ([STEPS], [1, 2, 3, 4, 5])
    assert run.did.index(("sync", STEPS)) < run.did.index(("evaluate", STEPS))

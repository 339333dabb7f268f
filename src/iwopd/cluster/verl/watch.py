"""Detects dead actors and failed rollouts, for which verl would wait for ever or which it would silently leave out.

verl requests the rollouts of a step and polls until all of them are marked as done. An agent loop whose process died marks
nothing, so verl polls for ever; a rollout that failed (a dead teacher) is left out, and the step trains on the rest. Here
the first ends the run with the names of the dead actors, the second with the number of failed rollouts; the last checkpoint
is intact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from iwopd.cluster.verl.errors import VerlError

CHECK_SECONDS = 5.0
GRACE_SECONDS = 2.0
"""Time between failed rollouts and the report, in which a dead server becomes visible."""


class Watch:
    """Wraps the replay buffer of verl's synchronous trainer."""

    def __init__(
        self,
        buffer: Any,
        actors: Callable[[], Mapping[str, Any]],
        samples: int,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`actors`: Ray handles that take part in the rollouts, by name; `samples`: rollouts per prompt.

        `leave` is called at every poll, and raises if the rollouts are not to be waited for.
        """
        self._actors = actors
        self._leave = leave
        self._samples = samples
        self._refs: dict[str, Any] = {}
        self._checked = time.monotonic()
        self._poll, self._sample = buffer._wait_for_next_poll, buffer.sample
        buffer._wait_for_next_poll, buffer.sample = self.wait_for_next_poll, self.sample

    def wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """The pause between two polls of verl, with a check of the actors every `CHECK_SECONDS`."""
        self._leave()
        now = time.monotonic()
        if now - self._checked >= CHECK_SECONDS:
            self._checked = now
            if dead := self.dead():
                raise VerlError(f"{_named(dead)} died while rollouts were sampled; see Ray's logs")
        return self._poll(partition_id, last_debug_time)  # type: ignore[no-any-return]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """The step's rollouts; an error if some of them are missing."""
        wanted = batch_size * self._samples
        try:
            batch, metrics = self._sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
            found = len(batch.keys)
        except RuntimeError as error:
            if "no materializable trajectories" not in str(error):
                raise
            found = 0
        if partition_id == "val" or found >= wanted:
            return batch, metrics
        time.sleep(GRACE_SECONDS)
        dead = self.dead()
        cause = f"{_named(dead)} died" if dead else "their errors are above or in Ray's logs"
        raise VerlError(f"step {global_steps}: {wanted - found} of {wanted} rollouts failed (sampling or scoring): {cause}")

    def dead(self) -> list[str]:
        """Names of the dead actors. One ping to each is always pending: busy ones answer later."""
        import ray

        actors = self._actors()
        if not actors:
            return []
        self._refs |= {name: actor.__ray_ready__.remote() for name, actor in actors.items() if name not in self._refs}
        answered, _ = ray.wait(list(self._refs.values()), num_returns=len(self._refs), timeout=1.0)
        dead = []
        for name, ref in list(self._refs.items()):
            if ref in answered:
                del self._refs[name]
                try:
                    ray.get(ref)
                except ray.exceptions.RayActorError:
                    dead.append(name)
        return dead


def rollout_actors(trainer: Any) -> dict[str, Any]:
    """The Ray actors that take part in a step's rollouts, by a descriptive name."""
    actors = {f"agent loop {n}": actor for n, actor in enumerate(trainer.agent_loop_manager.agent_loop_workers)}
    actors |= {f"student server {n}": actor for n, actor in enumerate(trainer.llm_server_manager.server_handles)}
    actors |= {f"reward worker {n}": actor for n, actor in enumerate(trainer.get_reward_handles() or [])}
    if trainer.teacher_model_manager is not None:
        for key, handles in trainer.teacher_model_manager.server_handles.items():
            actors |= {f"server {n} of teacher {key!r}": actor for n, actor in enumerate(handles)}
    return actors


def _named(dead: list[str]) -> str:
    return dead[0] if len(dead) == 1 else f"{', '.join(dead[:-1])} and {dead[-1]}"

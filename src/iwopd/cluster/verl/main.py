"""The program that trains on verl: `python -m iwopd.cluster.verl.main [Hydra overrides]`.

verl's own `verl.trainer.main_ppo` with four additions: settings that would change the method are refused
before Ray starts, the registration is verified, the trainer is ours (`trainer.py`), and SIGTERM makes it save (`stops.py`).
`iwopd train --engine verl` writes the overrides.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from iwopd.cluster.verl.machines import Machines, left, watch
from iwopd.cluster.verl.stops import StopAskedError, StopFile, listen
from iwopd.errors import UserError


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)  # type: ignore[untyped-decorator]
def main(config: DictConfig) -> None:
    """Check, then train."""
    try:
        train(config)
    except UserError as error:
        fault = _first_cause(error)
        print(f"iwopd: {fault}", file=sys.stderr)
        sys.exit(fault.exit_code)


def train(config: DictConfig) -> None:
    """Run verl with these settings."""
    import verl  # noqa: F401  # first: it loads the plugin

    from iwopd.cluster.verl.driver import check_driver

    check_driver(config)

    import ray
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    machines = Machines()
    try:
        run_ppo(config, task_runner_class=_Runner(machines))
    except ray.exceptions.RayError as error:
        if not isinstance(error, StopAskedError) and (gone := machines.gone()):
            raise left(gone) from error
        raise


class _Runner:
    """For `run_ppo`, which creates the task runner as soon as Ray is connected: before, it would replace our handler."""

    def __init__(self, machines: Machines) -> None:
        import ray

        from iwopd.cluster.verl.trainer import TaskRunner

        self._class = ray.remote(TaskRunner)
        self._machines = machines

    def options(self, **options: Any) -> Any:
        return self._class.options(**options)

    def remote(self) -> Any:
        if (stop := StopFile.of_this_job()) is not None:
            listen(stop)
        watch(self._machines)
        return self._class.remote()


def _first_cause(error: Any) -> UserError:
    """The original error inside Ray's wrappers."""
    while isinstance(cause := getattr(error, "cause", None), UserError):
        error = cause
    return error  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()

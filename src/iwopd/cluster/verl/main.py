"""The program that trains on verl: `python -m iwopd.cluster.verl.main [Hydra overrides]`.

verl's own `verl.trainer.main_ppo` with three additions: settings that would change the method are refused
before Ray starts, the registration is verified, and the trainer is ours (`trainer.py`). `iwopd train --engine verl` writes the
overrides.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
from omegaconf import DictConfig

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

    from iwopd.cluster.verl.trainer import TaskRunner

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=ray.remote(TaskRunner))


def _first_cause(error: Any) -> UserError:
    """The original error inside Ray's wrappers."""
    while isinstance(cause := getattr(error, "cause", None), UserError):
        error = cause
    return error  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()

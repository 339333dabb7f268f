"""Runs verl on a machine without GPUs, where `environment()` is set.

verl needs accelerators, and vLLM or SGLang. Here a platform `cpu` replaces the accelerator (Ray assigns logical
GPUs, one process each), gloo replaces NCCL, and servers around our own sampler and scorer replace vLLM. Everything else is
verl's: Ray actors, TransferQueue, agent loop, FSDP2 workers, weight sync, losses, checkpoints. Only fast enough for tests.

Every process that imports verl imports `verl_testing.installed` first (verl's own VERL_USE_EXTERNAL_MODULES); the launcher adds
`environment()` and `overrides()` to the job.
"""

from __future__ import annotations

import os
from pathlib import Path

from iwopd.cluster.verl.job import STAND_IN
from iwopd.cluster.verl.translate import TEACHERS
from iwopd.config import Config

BREAK = "VERL_TESTING_BREAK_SYNC"
"""How weight sync fails after the first one: `lost` (nobody is told), `stale` (told, the weights stay), `tensor` (one is 0)."""
OWN_TOKENS = "VERL_TESTING_OWN_TOKENS"
"""Set where the student is an embedded world's: of Qwen's architecture, with 21 ids and none of Qwen's tokens."""


def environment() -> dict[str, str]:
    """Variables of the launch and of every Ray worker."""
    return {
        STAND_IN: __name__,
        "VERL_USE_EXTERNAL_MODULES": f"{__name__}.installed",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for cuda; it asks the platform for its real device
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves its workers on a busy machine
        **{name: os.environ[name] for name in (BREAK,) if name in os.environ},
    }


def overrides(config: Config, gpus: int | None = None) -> list[str]:
    """Hydra overrides of verl's settings, to be placed after all others. `gpus`: number of logical GPUs of a local Ray."""
    settings: dict[str, object] = {
        "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": "hf",
        f"{TEACHERS}.teacher_model.inference.name": "hf",
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.include_dashboard": False,
    }
    for role in ("actor", "ref"):
        settings |= {
            f"actor_rollout_ref.{role}.strategy": "fsdp2",
            f"actor_rollout_ref.{role}.fsdp_config.use_torch_compile": False,
        }
    if config.teacher.others:
        settings |= {f"{TEACHERS}.iwopd_{number}.inference.name": "hf" for number in range(1 + len(config.teacher.others))}
    if gpus is not None:
        settings["ray_kwargs.ray_init.num_gpus"] = gpus
        settings["ray_kwargs.ray_init.num_cpus"] = 16  # slots, not cores: every verl actor needs one
    shared = environment() | ({OWN_TOKENS: "1"} if config.models.world is not None else {})
    variables = {f"ray_kwargs.ray_init.runtime_env.env_vars.{name}": f"'{value}'" for name, value in shared.items()}
    return [f"++{name}={value}" for name, value in (settings | variables).items()]

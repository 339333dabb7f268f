"""Who writes the rollouts of a run: the student in this process, a vLLM beside it, or a server. `rollout.engine` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from iwopd.config import Config, ConfigError
from iwopd.rollout.http import Connection
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.server import RolloutServer, ServerSampler
from iwopd.rollout.vllm import EngineOptions, VllmEngine, VllmSampler, output_rows
from iwopd.train.ranks import Ranks

MakeSampler = Callable[[SamplingSettings], Sampler]


def open_engine(
    config: Config, student: Any, *, context: int, pad_id: int, vocab_size: int, ranks: Ranks
) -> tuple[MakeSampler, Callable[[], None]]:
    """A function that makes samplers, and one that ends what they share.

    context: tokens that the longest prompt and its answer may have together.
    """
    if config.rollout.engine == "local":
        return lambda settings: LocalSampler(student, settings, pad_id=pad_id, vocab_size=vocab_size), lambda: None
    if ranks.count > 1:
        raise ConfigError(
            f"rollout.engine = {config.rollout.engine!r} feeds one training process, and there are {ranks.count}: start one, "
            "or set rollout.engine = 'local'"
        )
    if config.rollout.engine == "server":
        server = _server(config, student)
        rows = output_rows(student)
        return lambda settings: ServerSampler(server, settings, vocab_size=vocab_size, rows=rows), lambda: None
    engine = VllmEngine(student, _options(config, student, context))
    return lambda settings: VllmSampler(engine, settings, vocab_size=vocab_size), engine.close


def _server(config: Config, student: Any) -> RolloutServer:
    settings = config.vllm
    assert settings.url is not None  # the config was validated
    assert settings.weights_folder is not None
    connection = Connection(settings.url, settings.api_key_env, settings.request_timeout, settings.patience)
    return RolloutServer(
        connection,
        name=settings.name,
        student=student,
        weights_folder=Path(settings.weights_folder),
        max_in_flight=settings.max_in_flight,
    )


def _options(config: Config, student: Any, context: int) -> EngineOptions:
    settings = config.vllm
    text_config = student.config.get_text_config()
    most = getattr(text_config, "max_position_embeddings", None)
    wanted = settings.max_model_len or context
    return EngineOptions(
        max_model_len=wanted if most is None else min(wanted, most),
        dtype=settings.dtype or config.models.dtype,
        memory_share=settings.memory_share,
        cache_gb=settings.cache_gb,
        tensor_parallel=settings.tensor_parallel,
        eager=settings.eager,
        sleep=settings.sleep,
        seed=config.seed,
    )

"""One engine in this process and one server for all tests of a session: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iwopd.rollout.settings import VllmSettings
from iwopd.rollout.vllm import VllmEngine
from vllm_support import about, make_model, run_server, save_model


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that `vllm_server` serves: a folder with a tokenizer of 258 ids, output matrix of 270 rows."""
    return save_model(tmp_path_factory.mktemp("vllm") / "teacher", seed=2)


@pytest.fixture(scope="session")
def vllm_server(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a real vLLM server of `vllm_folder`, with vLLM's own defaults (raw log-probs, no development endpoints)."""
    with run_server(vllm_folder, tmp_path_factory.mktemp("log") / "server.log") as url:
        yield url


@pytest.fixture(scope="session")
def engine() -> Iterator[VllmEngine]:
    """An engine in this process, with a student of its own: 258 ids, 270 rows, tied embeddings."""
    started = VllmEngine(about(make_model(seed=1)), VllmSettings(max_model_len=256, eager=True))
    yield started
    started.close()


@pytest.fixture
def student(engine: VllmEngine) -> Iterator[Any]:
    """The engine's student; its weights are brought back after the test."""
    model = engine.student.model
    before = {name: values.clone() for name, values in model.state_dict().items()}
    yield model
    model.load_state_dict(before)

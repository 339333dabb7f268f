"""Two whole jobs and a pair of replicas, each once for all tests of a session: they take minutes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import verl_vllm_testing
from cluster_support import Job
from cluster_vllm_support import FORWARD_KL, IW_OPD, RUN_SECONDS, questions, train
from iwopd.tiny import open_world


def _whole_run(folder: Path, method: str) -> Path:
    open_world("clean")  # trains its models if they are not in the cache
    with train(folder, workers=1, method=method) as job:
        assert job.finish(RUN_SECONDS) == 0, job.text()[-3000:]
    return folder


@pytest.fixture(scope="session")
def iw_opd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job with IW-OPD."""
    return _whole_run(tmp_path_factory.mktemp("jobs") / "iw-opd", IW_OPD)


@pytest.fixture(scope="session")
def forward_kl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job with the forward KL over the teacher's likeliest ids."""
    return _whole_run(tmp_path_factory.mktemp("jobs") / "forward-kl", FORWARD_KL)


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """What verl's vLLM replicas of two models were asked, and what they answered."""
    folder = tmp_path_factory.mktemp("replicas")
    what = questions(folder)
    (folder / "questions.json").write_text(json.dumps(what))
    command = [sys.executable, "-m", "verl_vllm_testing.replicas", str(folder)]
    with Job(command, log=folder / "log.txt", variables=verl_vllm_testing.environment()) as job:
        assert job.finish(RUN_SECONDS) == 0, job.text()[-3000:]
    return what, json.loads((folder / "answers.json").read_text())

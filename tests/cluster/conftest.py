"""One whole run for all tests of a session: it takes one and a half minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_support import train
from iwopd.tiny import open_world


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of four steps without a fault."""
    open_world("clean")  # trains its models if they are not in the cache
    folder = tmp_path_factory.mktemp("whole")
    with train(folder, "run") as job:
        assert job.finish() == 0, job.text()[-3000:]
    return folder / "run"

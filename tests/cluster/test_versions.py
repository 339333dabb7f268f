"""Another version of verl beside the list of what we use: 0.9.0, from the package index, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import PATIENCE

OLDER = "0.9.0"
CHANGED = {
    "verl.trainer.distillation.losses.compute_topk_loss",
    "verl.trainer.main_ppo.run_ppo",
    "verl.trainer.ppo.v1.PPOTrainerSync",
    "verl.trainer.ppo.v1.PPOTrainer.__init__",
    "verl.trainer.ppo.v1.PPOTrainer.prepare_step",
    "verl.trainer.ppo.v1.PPOTrainer._save_checkpoint",
    "verl.trainer.ppo.v1.PPOTrainer._load_checkpoint",
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop.run",
    "verl.utils.dataset.rl_dataset.RLHFDataset",
}
"""What it has otherwise than 0.9.1: docs/cluster.md, "The next version of verl"."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds verl 0.9.0, without what it depends on."""
    folder = tmp_path_factory.mktemp("verl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", folder, f"verl=={OLDER}"], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        pytest.skip(f"verl {OLDER} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder


def run(older: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with that verl before the installed one."""
    place = {**os.environ, "PYTHONPATH": os.pathsep.join([str(older), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE, env=place)


def test_the_differences_are_named(older: Path) -> None:
    beside = run(older, "-m", "iwopd.cluster.verl.compatibility")
    assert beside.returncode == 1, beside.stderr
    *lines, summary = beside.stdout.splitlines()
    assert {re.split(" (?:is gone|has other|computes)", line)[0] for line in lines} == CHANGED, beside.stdout
    assert summary.startswith(f"verl {OLDER} against 0.9.1: {len(CHANGED)} differences")
    assert run(older, "-m", "iwopd.cluster.verl.compatibility", str(older)).stdout == beside.stdout


def test_a_job_with_it_is_refused_with_the_differences(older: Path) -> None:
    done = run(older, "-c", "from iwopd.cluster.verl.params import check_version; check_version()")
    assert done.returncode
    said = done.stderr.strip().splitlines()[-1]
    assert f"verl {OLDER} is installed, but iwopd was tested with 0.9.1 alone: pip install verl==0.9.1" in said
    assert f"{len(CHANGED)} things differ, first of all: verl.trainer.distillation.losses.compute_topk_loss" in said

"""docs/examples/slurm.sh as a user submits it, on two machines that are network namespaces, with a stand-in for Slurm alone.

`srun` and `scontrol` are `slurm_stub.py`; Ray (with its token), launcher, verl and signals are real, on the CPU platform.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import slurm_stub
from cluster_support import RECIPE, Job, steps
from iwopd.tiny import open_world
from iwopd.tiny.cache import cache_dir
from netns import INTERFACE, Machine, machines, why_not

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "slurm.sh"
STEPS = 3
SECONDS = 1500
"""Two starts of Ray and verl: three minutes on two free cores, many more on busy ones."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def submit(folder: Path, nodes: list[Machine], number: int, **settings: str) -> Job:
    """`sbatch slurm.sh`: the script runs on the first machine, with Slurm's variables."""
    programs = folder / "bin"
    if not programs.exists():
        slurm_stub.install(programs)
    home = folder / "home"  # shared by all machines, as usual: Ray's token is there
    home.mkdir(exist_ok=True)
    variables = {
        **slurm_stub.environment({node.address: node.name for node in nodes}, gpus=1, cpus=16),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "IWOPD_CACHE": str(cache_dir()),  # not in that home
        "RAY_AUTH_MODE": "token",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "RAY_prestart_worker_first_driver": "0",
        "VENV": str(Path(sys.prefix)),
        "RUN": str(folder / "run"),
        "RECIPE": str(folder / "recipe.toml"),
        "OPTIONS": "--engine.vllm.tensor-parallel 1",
        "PATIENCE": "900",
        **settings,
    }
    return Job(nodes[0].inside(["bash", str(SCRIPT)]), log=folder / f"job-{number}.log", variables=variables)


def shell_of(job: Job) -> int:
    """The process of the batch script, which is what Slurm's `--signal=B:TERM` reaches."""
    (pid,) = job.pids(f"bash {SCRIPT}")[:1]
    return pid


def nothing_left(job: Job, seconds: float = 120) -> bool:
    """The script has ended Ray on all machines before it ended itself; Ray's own helpers may take a moment longer."""
    deadline = time.monotonic() + seconds
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.5)
    return not job.pids()


def test_a_job_that_slurm_stops_goes_on_when_it_is_submitted_again(tmp_path: Path) -> None:
    open_world("clean")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(steps=STEPS))
    run = tmp_path / "run"
    with machines(2) as nodes:
        with submit(tmp_path, nodes, 1) as job:
            job.wait_for(lambda: (run / "checkpoints" / "step-000001").is_dir(), SECONDS)
            os.kill(shell_of(job), signal.SIGTERM)
            assert job.finish() == 143, job.text()[-3000:]
            assert "stopped by SIGTERM after step" in job.text()
            assert nothing_left(job)
        first = len(steps(run))
        assert 1 <= first <= STEPS
        with submit(tmp_path, nodes, 2) as job:
            assert job.finish(SECONDS) == 0, job.text()[-3000:]
            assert "trainer.resume_mode=resume_path" in (run / "verl" / "command.sh").read_text()
            assert nothing_left(job)
    assert [step["step"] for step in steps(run)] == list(range(1, STEPS + 1))
    assert (run / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors").is_file()


def test_a_machine_that_does_not_come_ends_the_job_in_words(tmp_path: Path) -> None:
    """Three machines were given, but Ray does not start on the third: nothing is trained."""
    (tmp_path / "recipe.toml").write_text(RECIPE.format(steps=STEPS))
    with machines(3) as nodes:
        nodes[2].link("down")
        with submit(tmp_path, nodes, 1, PATIENCE="60") as job:
            assert job.finish(SECONDS) == 1, job.text()[-3000:]
            assert re.search(r"slurm\.sh: Ray runs on \d of 3 machines after \d+ s", job.text())
            assert nothing_left(job)
    assert not (tmp_path / "run").exists()

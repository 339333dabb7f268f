"""What happens when a part of the job dies, a disk is full, or the cluster is smaller than asked; and resuming after it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster_support import Job, assert_same_steps, ray_cluster, steps, train


def run_until_step(job: Job, run: Path, step: int) -> None:
    job.wait_for(lambda: len(steps(run)) >= step)


def test_a_killed_worker_and_resume(whole_run: Path, tmp_path: Path) -> None:
    """A training worker is killed (SIGKILL): that ends the job; resumed, it takes the steps that an uninterrupted run takes."""
    run = tmp_path / "run"
    with train(tmp_path, "run") as job:
        run_until_step(job, run, 2)
        job.kill("ray::WorkerDict", which=1)
        assert job.finish() == 1
        assert job.pids() == []  # nothing of Ray stays behind
        assert "--resume" in job.text()
    done = len(steps(run))
    assert done in (2, 3)  # the next step may have been under way
    with train(tmp_path, "run", "--resume") as job:
        assert job.finish() == 0, job.text()[-3000:]
    assert_same_steps(run, whole_run)


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("ray::TeacherServer", "of teacher|TeacherServer"),
        ("ray::StudentServer", "student server|StudentServer"),
        ("ray::AgentLoopWorker", "agent loop|AgentLoopWorker"),
    ],
)
def test_a_dead_server(tmp_path: Path, title: str, words: str) -> None:
    """The job ends and names it. verl alone trains on what is left of the batch, or waits for ever for a dead agent loop.

    Exit code 2 and our words while answers are written; 1 and Ray's when weights are being sent to it.
    """
    run = tmp_path / "run"
    with train(tmp_path, "run", steps=50) as job:
        run_until_step(job, run, 1)
        job.kill(title)
        assert job.finish() in (1, 2)
        assert job.pids() == []
        said = job.text().partition("iwopd: ")[2]
        assert re.search(words, said)
        assert "--resume" in said
    for step in steps(run):
        assert step["rollouts"] == 16


def test_a_full_disk(tmp_path: Path) -> None:
    """No room for the second checkpoint: the job ends with the reason, and the first one is still the one to go on from."""
    unshare = shutil.which("unshare")
    flags = ["--mount", "--map-root-user"]
    if unshare is None or subprocess.run([unshare, *flags, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace for a small file system")
    small = tmp_path / "small"
    small.mkdir()
    script = 'mount -t tmpfs -o size=3m none "$0" && "$@"; code=$?; cp -r "$0" "$0-seen"; exit $code'
    wrapper = [unshare, *flags, "sh", "-c", script, str(small)]
    with train(tmp_path, "run", "--cluster.checkpoints", str(small), wrapper=wrapper) as job:
        assert job.finish() == 1
        assert "not enough room" in job.text()
    seen = tmp_path / "small-seen"
    latest = int((seen / "latest_checkpointed_iteration.txt").read_text())
    assert latest >= 1
    assert (seen / f"global_step_{latest}" / "data.pt").stat().st_size > 0
    assert [step["step"] for step in steps(tmp_path / "run")][:latest] == list(range(1, latest + 1))


def test_a_cluster_that_is_too_small(tmp_path: Path) -> None:
    """Three GPUs are asked for, the Ray cluster has two: said with both numbers before anything is loaded."""
    with ray_cluster(tmp_path / "ray.log", gpus=2) as address, train(tmp_path, "run", "--ray-address", address) as job:
        assert job.finish() == 2
        assert "1 x 3 GPUs" in job.text()
        assert f"at {address} have 2" in job.text()
    assert not (tmp_path / "run" / "run.json").exists()

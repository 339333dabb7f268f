"""Several machines: ranks of the student on two of them, the teacher on a third; what happens when one of them fails.

The machines are network namespaces of this computer: own addresses, own mounts, a switch between them.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from cluster_nodes import ray_nodes
from cluster_support import assert_same_steps, steps, train
from netns import as_in, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
START_SECONDS = 900
END_SECONDS = 400
"""Ray declares a node dead that has not answered for about a minute; a busy computer takes longer."""
RANK, TEACHER = "ray::WorkerDict", "ray::TeacherServer"


def test_three_machines(whole_run: Path, tmp_path: Path) -> None:
    """The steps of one machine, although one loses its network for 20 s, has a slow one, and stands still for some seconds."""
    run = tmp_path / "run"
    with ray_nodes(tmp_path) as cluster, cluster.train(tmp_path) as job:
        job.wait_for(lambda: len(steps(run)) >= 1, START_SECONDS)
        ranks, teachers = cluster.where(RANK), cluster.where(TEACHER)
        assert (len(ranks), len(teachers)) == (2, 1)
        assert teachers[0] not in ranks
        victim = cluster.where(RANK)[0]
        victim.machine.link("down")
        time.sleep(20)
        victim.machine.link("up")
        job.wait_for(lambda: len(steps(run)) >= 2, START_SECONDS)
        victim.machine.slow("2mbit")
        victim.pause()
        time.sleep(10)
        victim.go_on()
        job.wait_for(lambda: len(steps(run)) >= 3, START_SECONDS)
        victim.machine.fast()
        assert job.finish(START_SECONDS) == 0, job.text()[-3000:]
    assert_same_steps(run, whole_run)


@pytest.mark.parametrize(("how", "title"), [("killed", RANK), ("unplugged", RANK), ("unplugged", TEACHER)])
def test_a_machine_that_vanishes(whole_run: Path, tmp_path: Path, how: str, title: str) -> None:
    """All its processes are gone at once, or nothing is heard of it any more: the job ends, and goes on with fewer machines."""
    run = tmp_path / "run"
    with ray_nodes(tmp_path) as cluster, cluster.train(tmp_path) as job:
        job.wait_for(lambda: len(steps(run)) >= 1, START_SECONDS)
        victim = cluster.where(title)[0]
        if how == "killed":
            victim.job.end()
        else:
            victim.machine.remove()
        assert job.finish(END_SECONDS) in (1, 2)
        said = job.text().partition("iwopd: ")[2]
        assert re.search(r"died|dead|failed", said), said
        assert "--resume" in said
    if (how, title) != ("killed", RANK):
        return
    with train(tmp_path, "run", "--resume", "--nodes", "1", "--gpus-per-node", "2") as job:
        assert job.finish(START_SECONDS) == 2
        assert "was saved by 2 student GPUs, and now there are 1" in job.text()
        assert "start a new run from the weights alone" in job.text()
    with train(tmp_path, "run", "--resume", "--nodes", "1", "--gpus-per-node", "3") as job:
        assert job.finish(START_SECONDS) == 0, job.text()[-3000:]
    assert_same_steps(run, whole_run)


def test_a_machine_that_does_not_see_the_folder(tmp_path: Path) -> None:
    """It is named before anything starts. Its shards would have gone to its own disk."""
    shared = tmp_path / "shared"
    shared.mkdir()
    with (
        ray_nodes(tmp_path, before=f"mount -t tmpfs none {shared}") as cluster,
        cluster.train(tmp_path, "--cluster.checkpoints", str(shared / "checkpoints")) as job,
    ):
        assert job.finish(START_SECONDS) == 2
        machine = cluster.workers[0].machine.address
        assert f"the machine {machine} does not see {shared / 'checkpoints'}" in job.text()
    assert not (tmp_path / "run" / "run.json").exists()
    assert list(shared.iterdir()) == []


def test_a_full_disk_on_one_machine(tmp_path: Path) -> None:
    """A rank cannot write its shard: the job ends with the machine's address, and the checkpoint before is the newest."""
    run, shared = tmp_path / "run", tmp_path / "shared"
    shared.mkdir()
    with (
        ray_nodes(tmp_path) as cluster,
        cluster.train(tmp_path, "--cluster.checkpoints", str(shared), steps=50) as job,
    ):
        job.wait_for(lambda: len(steps(run)) >= 1, START_SECONDS)
        victim = cluster.where(RANK)[0]
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(shared)]
        subprocess.run(as_in(victim.job.process.pid, mount), check=True)
        assert job.finish(END_SECONDS) == 1
        assert "--resume" in job.text()
        assert victim.machine.address in job.text(), job.text()[-3000:]
        assert re.search(r"(?i)no space left|writ", job.text())

"""A Ray cluster whose nodes are network namespaces (`netns.py`): own addresses, own temporary folders, a head and GPU nodes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster_support import Job, train
from netns import INTERFACE, Machine, as_in, machines

PORT = 6379
START_SECONDS = 900
TRIES = 5
VARIABLES = {
    "GLOO_SOCKET_IFNAME": INTERFACE,  # else gloo asks for the address of the host's name, which is not that of the machine
    "RAY_prestart_worker_first_driver": "0",  # one process per slot: too many for a small computer
    "RAY_raylet_start_wait_time_s": "300",  # busy computers take longer than Ray's 30 s
}


@dataclass(frozen=True)
class Node:
    """A machine and Ray's processes on it."""

    machine: Machine
    job: Job

    def pause(self) -> None:
        """Stop all its processes where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.job.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass(frozen=True)
class Nodes:
    """The cluster. The launcher runs on the head, which has no GPU; the others have one each."""

    head: Node
    workers: Sequence[Node]

    @property
    def address(self) -> str:
        return f"{self.head.machine.address}:{PORT}"

    def train(self, folder: Path, *arguments: str, steps: int = 4) -> Job:
        """The tiny recipe with a rank on each of two nodes and the teacher on a third, launched on the head."""
        shape = ("--nodes", "3", "--gpus-per-node", "1", "--engine.vllm.tensor-parallel", "1")
        variables = {**VARIABLES, "RAY_TMPDIR": self.head.job.variables["RAY_TMPDIR"]}
        wrapper = as_in(self.head.job.process.pid, [])
        where = ("--ray-address", self.address)
        return train(folder, "run", *shape, *where, *arguments, steps=steps, wrapper=wrapper, variables=variables)

    def where(self, title: str) -> list[Node]:
        """Nodes on which a process of this title runs."""
        return [node for node in (self.head, *self.workers) if node.job.pids(title)]


def _started(stack: ExitStack, job: Job) -> Job:
    """Start it, more than once if need be: Ray gives its own processes 30 s, which is not enough on a busy computer."""
    stack.enter_context(job)
    for _ in range(TRIES):
        job.wait_for(lambda: "Ray runtime started" in job.text() or job.process.poll() is not None, START_SECONDS)
        if job.process.poll() is None:
            return job
        job.end()
        job.__enter__()
    raise AssertionError(f"Ray did not start in {TRIES} tries:\n{job.text()[-3000:]}")


@contextmanager
def ray_nodes(folder: Path, before: str = "true") -> Iterator[Nodes]:
    """A head and three nodes with a GPU each; `before` is shell text that the first of these runs before Ray (mounts)."""
    with ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="iw", dir="/tmp"))  # short: sockets live there
        own = f"mount -t tmpfs none {temporary}"
        nodes: list[Node] = []
        for number, machine in enumerate(stack.enter_context(machines(4))):
            command = [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={machine.address}"]
            if number == 0:
                command += ["--head", f"--port={PORT}", "--include-dashboard=false", "--num-gpus=0"]
            else:
                command += [f"--address={nodes[0].machine.address}:{PORT}", "--num-gpus=1"]
            inside = machine.inside([*command, "--num-cpus=8"], f"{own} && {before}" if number == 1 else own)
            job = Job(inside, log=folder / f"node-{number}.log", variables={**VARIABLES, "RAY_TMPDIR": temporary})
            nodes.append(Node(machine, _started(stack, job)))
        yield Nodes(nodes[0], nodes[1:])

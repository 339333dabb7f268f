"""How GPUs are divided. verl has two pools: the student's (update and rollouts take turns) and the teachers'.

A pool has the same number of GPUs on each of its machines. The teachers get whole machines if possible,
else the same number of GPUs on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from iwopd.cluster.verl.errors import VerlError
from iwopd.config import Cluster, Config


@dataclass(frozen=True)
class Pool:
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        machines = "1 machine" if self.nodes == 1 else f"{self.nodes} machines"
        return f"{self.gpus} GPUs ({machines} x {self.gpus_per_node})"


@dataclass(frozen=True)
class Pools:
    student: Pool
    teacher: Pool
    teacher_replicas: int
    """Copies of each teacher."""


def pools(config: Config) -> Pools:
    """Divide the GPUs, or raise an error that says why it is impossible."""
    cluster = config.cluster
    total = cluster.nodes * cluster.gpus_per_node
    if total < 2:
        few = "cluster.nodes x cluster.gpus_per_node is 1 GPU, and student and teacher need one each"
        raise VerlError(f"{few}: use 2, or the local engine")
    wanted = cluster.teacher_gpus or total // 2
    if wanted >= total:
        raise VerlError(
            f"cluster.teacher_gpus is {wanted} of {total} GPUs ({cluster.nodes} machines x {cluster.gpus_per_node}): "
            "nothing is left for the student"
        )
    student, teacher = _rectangles(cluster, wanted)
    count = 1 + len(config.teacher.others)
    copy = cluster.teacher_tensor_parallel
    if teacher.gpus % (count * copy):
        raise VerlError(
            f"the teachers' pool has {teacher.gpus} GPUs, but {count} {'teacher' if count == 1 else 'teachers'} x "
            f"{copy} GPUs per copy (cluster.teacher_tensor_parallel) must fill it exactly: set cluster.teacher_gpus to a "
            f"multiple of {count * copy}"
        )
    small, large = sorted((copy, teacher.gpus_per_node))
    if large % small:
        raise VerlError(
            f"cluster.teacher_tensor_parallel is {copy}, and the teachers have {teacher.gpus_per_node} GPUs on each of "
            f"{teacher.nodes} machines: a copy would span machines; choose a divisor of {teacher.gpus_per_node}"
        )
    return Pools(student, teacher, teacher.gpus // (count * copy))


def _rectangles(cluster: Cluster, wanted: int) -> tuple[Pool, Pool]:
    nodes, gpus = cluster.nodes, cluster.gpus_per_node
    if wanted % gpus == 0 and nodes > 1:
        return Pool(nodes - wanted // gpus, gpus), Pool(wanted // gpus, gpus)
    if wanted % nodes == 0:
        share = wanted // nodes
        return Pool(nodes, gpus - share), Pool(nodes, share)
    raise VerlError(
        f"cluster.teacher_gpus is {wanted}, which is neither whole machines (multiples of {gpus}) nor the same number of GPUs "
        f"on each of {nodes} machines (multiples of {nodes}): choose one of these"
    )

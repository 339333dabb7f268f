"""Machines that leave the Ray cluster while a job runs on them.

Ray fails the calls that wait for such a machine, and says "The actor died". Calls of verl's data queue have no time limit: if
the queue's process was there, verl waits for ever. Here the driver names the machine, and ends a job that did not notice.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from iwopd.cluster.verl.errors import VerlError

CHECK_SECONDS = 10.0
NOTICE_SECONDS = 60.0
"""What the job gets to end by itself after a machine has left."""


class Machines:
    """Machines on which this job holds GPUs."""

    def __init__(self) -> None:
        self._used: dict[str, str] = {}

    def gone(self) -> list[str]:
        """Addresses of those that have left the cluster."""
        import ray

        nodes = {node["NodeID"]: node for node in ray.nodes()}
        self._used |= {key: nodes[key]["NodeManagerAddress"] for key in _nodes_of_this_job() if key in nodes}
        return sorted(address for key, address in self._used.items() if key not in nodes or not nodes[key]["Alive"])


def left(addresses: list[str]) -> VerlError:
    """What is said about them."""
    who, why = (
        ("machine", "it died, or its network did") if len(addresses) == 1 else ("machines", "they died, or their network did")
    )
    return VerlError(f"the {who} {', '.join(addresses)} left the Ray cluster while the job ran: {why}")


def watch(machines: Machines, leave: Callable[[int], Any] = os._exit) -> None:
    """In a thread: end this process some time after a machine has left, if nothing else did."""
    threading.Thread(target=_watch, args=(machines, leave), daemon=True, name="iwopd-machines").start()


def _watch(machines: Machines, leave: Callable[[int], Any]) -> None:
    since: float | None = None
    while True:
        time.sleep(CHECK_SECONDS)
        try:
            gone = machines.gone()
        except Exception:  # Ray itself is gone or busy: its own errors say so
            continue
        since = (since or time.monotonic()) if gone else None
        if since is not None and time.monotonic() - since >= NOTICE_SECONDS:
            error = left(gone)
            print(f"iwopd: {error}", file=sys.stderr, flush=True)
            leave(error.exit_code)
            return


def _nodes_of_this_job() -> set[str]:
    """Ray's ids of the nodes of its placement groups, whose ids end with that of the job."""
    import ray
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()
    own = [group for key, group in placement_group_table().items() if key.endswith(job)]
    return {node for group in own for node in group["bundles_to_node_id"].values()}

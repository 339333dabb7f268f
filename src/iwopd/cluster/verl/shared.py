"""Before a job starts: does every machine of the Ray cluster see the folders of the run, and may it write there?

A machine that does not would train all the same: its shards of a checkpoint land on its own disk, no checkpoint is ever
complete, and that comes out at the resume.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from iwopd.cluster.verl.errors import VerlError

ANSWER = 120.0
"""Seconds for all machines to look."""
_MARK = "seen-by-all"
_LOOK = """
import json, os, sys, tempfile, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

address, marks, models, seconds = sys.argv[1], *map(json.loads, sys.argv[2:5])
ray.init(address=address, logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0, max_retries=0)
def look():
    missing = [path for path in (*marks, *models) if not os.path.exists(path)]
    locked = []
    for path in set(marks) - set(missing):
        try:
            tempfile.TemporaryFile(dir=os.path.dirname(path)).close()
        except OSError as error:
            locked.append([path, error.strerror])
    return missing, locked

nodes = {look.options(scheduling_strategy=OnNode(node["NodeID"], soft=False)).remote(): node["NodeManagerAddress"]
         for node in ray.nodes() if node["Alive"]}
answered, silent = ray.wait(list(nodes), num_returns=len(nodes), timeout=seconds)
print(json.dumps([[[nodes[ref], *ray.get(ref)] for ref in answered], [nodes[ref] for ref in silent]]))
"""


def check_shared(address: str, folders: Sequence[Path], models: Sequence[str]) -> None:
    """Refuse a cluster in which a machine does not see a folder that all must write to, or a model's folder."""
    local = [str(Path(path).absolute()) for path in models if Path(path).is_dir()]
    with _marks(folders) as marks:
        arguments = [address, json.dumps(list(marks)), json.dumps(local), json.dumps(ANSWER)]
        done = subprocess.run([sys.executable, "-c", _LOOK, *arguments], capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise VerlError(f"the machines of the Ray cluster at {address} could not be asked for the run's folders: {words[0]}")
    answers, silent = json.loads(done.stdout.strip().splitlines()[-1])
    for machine, missing, locked in answers:
        for path in missing:
            what = f"{marks[path]} as this machine does" if path in marks else f"the model {path}"
            raise VerlError(
                f"the machine {machine} does not see {what}: run directory (--out), cluster.checkpoints and models must be on "
                "a file system that all machines of the Ray cluster share, under the same path"
            )
        for path, reason in locked:
            raise VerlError(f"the machine {machine} cannot write to {marks[path]} ({reason}): all machines must be able to")
    if silent:
        raise VerlError(
            f"{', '.join(silent)} did not answer within {ANSWER:g} s: see `ray status`, and take them out of the cluster"
        )


@contextmanager
def _marks(folders: Sequence[Path]) -> Iterator[dict[str, Path]]:
    """Files to look for, and the folder that each stands for: in it, or in the nearest one above that exists."""
    with ExitStack() as stack:
        marks = {}
        for folder in dict.fromkeys(folders):
            there = next(place for place in (folder, *folder.parents) if place.is_dir())
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=there, prefix=".iwopd-seen-")))
            (own / _MARK).touch()
            marks[str(own / _MARK)] = folder
        yield marks
